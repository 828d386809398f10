"""Traces, shares and sentences of the comparison with other simulators."""

import json

import simulators


def test_generated_requests_follow_from_the_seed_and_share_documents():
    first, again, other = (list(simulators.generated(400, seed, documents=20)) for seed in (0, 0, 1))
    assert first == again != other
    for row in first:
        assert len(row["hash_ids"]) == -(-row["input_length"] // simulators.TRACE_BLOCK)
    heads = [row["hash_ids"][0] for row in first]
    counts = sorted((heads.count(head) for head in set(heads)), reverse=True)
    assert counts[0] > 4 * counts[-1]  # Zipf: some documents are popular
    assert len({row["hash_ids"][-1] for row in first}) == len(first)  # every question is new


def test_requests_apart_keep_all_but_their_times():
    lines = [json.dumps({"timestamp": 5, "input_length": 3, "hash_ids": [1]})] * 2
    assert [row["timestamp"] for row in simulators.apart(lines)] == [0, 600_000]
    assert all(row["hash_ids"] == [1] for row in simulators.apart(lines))


def row(cpu_s: float, reused: int | None) -> dict:
    counts = None if reused is None else [reused, 1000]
    return {"cpu_s": cpu_s, "wall_s": 2.0, "mib": 50.0, "load": 1.0, "all": counts, "half": None}


def test_ratios_are_those_of_one_turn_and_one_block_size():
    rows = {
        "mocker_16": [row(10.0, 300)],
        "mocker_512": [row(1.0, 200), row(4.0, 200)],
        "compiled_512": [row(3.0, 210), row(8.0, 210)],
    }
    assert simulators.ratios(rows, "compiled_512") == [3.0, 2.0]
    assert simulators.ratios(rows, "mocker_512") == []
    text = simulators.lines_of("A trace", rows)
    assert "| spanlab, compiled | 512 | 2 | 5.5 [3.0, 8.0] | 2.5 × | 2 | 50 | 21.00 % | – |" in text
    assert "| mocker | 16 | 1 | 10.0 | – |" in text
    assert "0 tokens, spanlab 210" in text


def test_agreement_tells_equal_reuse_from_a_difference_and_from_other_prompts():
    assert "reuse the same 300 of 1,000" in simulators.agreement(16, [300, 1000], [300, 1000])
    assert "1 points fewer of 1,000" in simulators.agreement(16, [300, 1000], [290, 1000])
    assert "the prompts differ" in simulators.agreement(16, [300, 1000], [300, 999])


def test_kvlint_gets_tokens_that_are_equal_where_blocks_are(tmp_path):
    from simulators_worker import prompts

    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f"{json.dumps({'input_length': 5, 'hash_ids': ids})}\n" for ids in ([1, 2], [1, 3])))
    assert list(prompts(str(trace), 4)) == [[1, 1, 1, 1, 2], [1, 1, 1, 1, 3]]

"""Prompts and tables of the comparison with other systems."""

import json

import numpy as np
import simulators
from names import SYSTEMS
from prompts import DOCUMENTS, Trial, ids_of
from tables import goal_rows, lines_of, rows_of


def test_requests_of_a_trial_share_documents_and_no_question():
    texts = [np.arange(10 * number, 10 * number + 5, dtype=np.int32) for number in range(DOCUMENTS)]
    questions = [np.full(3, 100 + number, np.int32) for number in range(3)]
    requests = Trial.of(texts, questions).requests
    cold, same, shuffled = (requests[kind].spans for kind in ("cold", "same", "shuffled"))
    assert [span.independent for span in cold] == [True] * DOCUMENTS + [False]
    assert cold[:-1] == same[:-1]
    assert all(one is not other for one, other in zip(cold[:-1], shuffled[:-1], strict=True))
    assert {id(span) for span in cold[:-1]} == {id(span) for span in shuffled[:-1]}
    assert len({spans[-1].tokens[0] for spans in (cold, same, shuffled)}) == 3
    assert ids_of(requests["cold"])[:6] == [0, 1, 2, 3, 4, 10]
    assert len({len(ids_of(request)) for request in requests.values()}) == 1


def results(**seconds: tuple[float, float]) -> dict:
    """Results at 1,000 words with cold and shuffled seconds of some systems; two equal trials each."""
    rows = {}
    for name, (cold, shuffled) in seconds.items():
        trial = {"cold": {"seconds": cold, "reused": 0}, "tokens": 1000}
        if name not in ("transformers", "none"):
            trial |= {"same": {"seconds": 1.0, "reused": 900}, "shuffled": {"seconds": shuffled, "reused": 500}}
        rows[f"float32/1000/{name}"] = [trial, trial]
    return {
        "words": [1000],
        "rows": rows,
        "left_out": {"float32/mistralrs": {"words": 500, "seconds": 31.0}},
        "limit_s": 15.0,
        "peers": {"vllm": "0.32.0"},
        "source": "of real texts",
        "threads": 2,
        "machine": "2 x CPU",
        "versions": {"torch": "2", "transformers": "5"},
        "commit": "0" * 12,
    }


def test_ours_is_compared_with_the_fastest_peer_of_each_kind():
    found = results(vllm=(2.0, 4.0), transformers=(3.0, 3.0), none=(2.4, 2.4), pic=(2.0, 0.25), cached_order=(2.0, 0.5))
    assert list(goal_rows(found, "float32")) == [("1,000", "vLLM", "1.20 ×", "transformers", "12.0 ×", "6.0 ×")]


def test_a_system_without_a_cache_is_as_cold_in_every_order():
    rows = list(rows_of(results(transformers=(3.0, 3.0)), "float32"))
    assert [row[2] for row in rows] == ["3.000"] * 3
    assert [row[-1] for row in rows] == ["0 %"] * 3


def test_what_is_missing_is_named():
    lines = lines_of(results(vllm=(2.0, 4.0), none=(2.4, 2.4)))
    assert "mistral.rs, float32: 500 words took 31 s cold, more than the limit of 15 s" in lines
    absent = next(line for line in lines.splitlines() if line.startswith("Not measured: "))
    assert absent.count(",") == len(SYSTEMS) - 2 - 1 + absent.count("ours,")


# -- Traces, shares and sentences of the comparison with other simulators. ---


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

"""Written sessions read back as the same sessions; what a format cannot express is counted."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import orjson
import pytest

from spanlab.core.request import Request, Span
from spanlab.workloads.logs.log import Log
from spanlab.workloads.logs.read import LogSettings, read_log
from spanlab.workloads.writers import SESSIONS, WRITERS, SessionWriter, trees_of

BLOCK = 16
SECOND = 10**9


def lines_of_calls(sessions: int = 3, turns: int = 4, *, seed: int = 0) -> list[Request]:
    """Return sessions whose prompts are the prompt before, its answer and new tokens; all share a beginning."""
    draw = np.random.default_rng(seed)
    shared = np.arange(40, dtype=np.int32)
    requests: list[Request] = []
    fresh = 1000
    for session in range(sessions):
        prompt = shared
        for turn in range(turns):
            new = 61 * turn + 7 * session + 5  # every prompt has another length
            prompt = np.concatenate([prompt, np.arange(fresh, fresh + new, dtype=np.int32)])
            fresh += new
            output, number = int(draw.integers(1, 30)), len(requests)
            requests.append(
                Request(
                    id=number,
                    group_id=session,
                    spans=(Span(prompt),),
                    output_len=output,
                    arrived_at=session * 7 * SECOND,
                    after=(number - 1,) if turn else (),
                    wait_ns=int(draw.integers(0, 5 * SECOND)) if turn else 0,
                )
            )
            prompt = np.concatenate([prompt, np.arange(fresh, fresh + output, dtype=np.int32)])
            fresh += output
    return requests


def tree_of_calls() -> list[Request]:
    """Return a tree: a first call, two agents with one and two calls, and a call that waits for both."""
    base = lines_of_calls(1, 5)

    def alone(start: int) -> Span:
        return Span(np.arange(start, start + 50, dtype=np.int32))

    agent = replace(base[2], spans=(alone(90_000),), after=(0,))
    second = replace(base[3], spans=(*agent.spans, alone(91_000)), after=(2,))
    last = replace(base[4], spans=base[1].spans, after=(0, 1, 3))
    return [base[0], replace(base[1], spans=(alone(80_000),), after=(0,)), agent, second, last]


def written(folder: Path, name: str, requests: list[Request]) -> tuple[Log, SessionWriter]:
    writer = WRITERS.make(name, {}, {"block_size": BLOCK})
    assert isinstance(writer, SessionWriter)
    path = folder / f"{name}.jsonl"
    path.write_bytes(b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in writer(requests)))
    return read_log(path, LogSettings()), writer


def order_of(log: Log, requests: list[Request]) -> list[int]:
    """Return the number in the log of each request, by lengths, which differ in these samples."""
    lengths = log.prompt_tokens.tolist()
    return [lengths.index(request.num_tokens) for request in requests]


@pytest.mark.parametrize("name", SESSIONS)
def test_lines_of_calls_come_back_as_they_were(tmp_path: Path, name: str):
    requests = lines_of_calls()
    log, writer = written(tmp_path, name, requests)
    numbers = order_of(log, requests)
    assert sorted(numbers) == list(range(len(requests)))
    assert log.output_lens[numbers].tolist() == [request.output_len for request in requests]
    assert log.sessions is not None
    names = log.sessions[numbers].tolist()
    assert [names.index(name) // 4 for name in names] == [request.group_id for request in requests]
    assert log.waits_ns is not None
    assert np.allclose(log.waits_ns[numbers], [request.wait_ns for request in requests], atol=1e3)
    expected = {f"not expressed: 2 {what}" for what in ("beginnings that several trees share",)}
    assert {note.partition(":")[0] + ":" + note.split(":")[1] for note in writer.notes()} == (
        set() if name == "aiperf" else expected
    )


@pytest.mark.parametrize("name", SESSIONS)
def test_prefixes_within_a_session_come_back(tmp_path: Path, name: str):
    requests = lines_of_calls()
    log, _ = written(tmp_path, name, requests)
    numbers = order_of(log, requests)
    for before, after in pairwise(numbers[:4]):
        first, second = (log.pieces[log.starts[number] : log.starts[number + 1]].tolist() for number in (before, after))
        shared = next((place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))
        tokens = int(log.lengths[log.starts[before] : log.starts[before] + shared].sum())
        whole = requests[order_of(log, requests).index(before)].num_tokens
        assert whole // BLOCK * BLOCK <= tokens <= whole


def test_dynamo_keeps_every_wait_of_a_tree(tmp_path: Path):
    requests = tree_of_calls()
    log, writer = written(tmp_path, "dynamo", requests)
    assert writer.notes() == []
    assert log.after is not None
    by_request = {f"r{request.id}": request for request in requests}
    rows = [orjson.loads(line) for line in (tmp_path / "dynamo.jsonl").read_bytes().splitlines()]
    assert (rows[0]["schema"], rows[0]["version"]) == ("dynamo.agentic_mooncake", 2)
    for row in rows[1:]:
        request = by_request[row["request_id"]]
        assert [dependency["request_id"] for dependency in row["dependencies"]] == [f"r{n}" for n in request.after]
        assert {dependency["delay_ms"] * 1e6 for dependency in row["dependencies"]} <= {request.wait_ns}
    relations = {row["request_id"]: [one["relation"] for one in row["dependencies"]] for row in rows[1:]}
    assert relations == {
        "r0": [],
        "r1": ["spawn"],
        "r2": ["spawn"],
        "r3": ["sequence"],
        "r4": ["sequence", "join", "join"],
    }
    edges = {
        (int(log.prompt_tokens[call]), int(log.prompt_tokens[other])) for call in range(5) for other in log.after[call]
    }
    assert edges == {
        (request.num_tokens, requests[other].num_tokens) for request in requests for other in request.after
    }
    assert len(set(log.sessions.tolist())) == 3
    assert log.families.tolist() == [0] * 5


@pytest.mark.parametrize(("name", "count"), [("aiperf", 4), ("weka", 3)])
def test_waits_that_a_format_lacks_are_counted(tmp_path: Path, name: str, count: int):
    log, writer = written(tmp_path, name, tree_of_calls())
    assert any(note.startswith(f"not expressed: {count} waits") for note in writer.notes())
    assert log.requests == 5


def test_aiperf_counts_turns_that_it_makes_longer(tmp_path: Path):
    requests = lines_of_calls(1, 2)
    requests[0] = replace(requests[0], output_len=500)  # a history without the reasoning of the answer
    log, writer = written(tmp_path, "aiperf", requests)
    assert log.prompt_tokens.tolist() == [requests[0].num_tokens, requests[0].num_tokens + 501]
    assert any("1 calls whose prompt is longer there" in note for note in writer.notes())


def test_aiperf_begins_a_session_where_the_beginning_changes(tmp_path: Path):
    requests = lines_of_calls(1, 3)
    requests[2] = replace(requests[2], spans=(Span(np.arange(5000, 5060, dtype=np.int32)),))
    log, writer = written(tmp_path, "aiperf", requests)
    assert len(set(log.sessions.tolist())) == 2
    assert any("1 calls that go on with another beginning" in note for note in writer.notes())
    assert log.prompt_tokens.tolist() == [request.num_tokens for request in requests]


def test_calls_of_one_tree_are_one_session_each():
    [tree] = trees_of(tree_of_calls())
    assert dict(tree.sessions) == {0: 0, 1: 1, 2: 2, 3: 2, 4: 0}


def test_first_version_of_dynamo_is_read(tmp_path: Path):
    rows = [
        {"request_id": "a", "session_id": "m", "input_length": 40, "output_length": 9, "hash_ids": [0, 1, 2],
         "timestamp": 0},
        {"request_id": "b", "session_id": "m", "input_length": 50, "output_length": 3, "hash_ids": [0, 1, 3, 4],
         "timestamp": 9000, "wait_for": ["a"], "delay": 250.0, "tool_wait_ms": 750.0, "prefix_reset": False},
        {"request_id": "c", "session_id": "k", "input_length": 16, "output_length": 3, "hash_ids": [7],
         "timestamp": 9500, "wait_for": ["b", "gone"]},
    ]  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))
    log = read_log(path, LogSettings())
    assert (log.format, log.block, log.after) == ("agentic_mooncake", 16, ((), (0,), (1,)))
    assert log.waits_ns.tolist() == [0, SECOND, 0]
    assert (log.arrived_ns * 1e-9).tolist() == [0.0, 9.0, 9.5]
    assert any(note.startswith("1 calls that others wait for") for note in log.notes)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"request_id": "a", "input_length": 16, "hash_ids": [1, 2], "wait_for": []}, "hash_ids: expected 1 ids"),
        (
            {"request_id": "a", "input_length": 16, "hash_ids": [1], "wait_for": "b"},
            "wait_for: expected a list of texts",
        ),
        (
            {"request_id": 1.5, "input_length": 16, "hash_ids": [1], "wait_for": [7]},
            "wait_for: expected a list of texts",
        ),
        ({"input_length": 16, "hash_ids": [1]}, "request_id: expected a text, and it is missing"),
        ({"request_id": "a", "hash_ids": [1], "wait_for": []}, "input_length"),
        (
            {"request_id": "a", "input_length": 16, "hash_ids": [1], "dependencies": [{"request_id": "b"}]},
            r"dependencies\[0\].trigger: expected completion or dispatch",
        ),
        (
            {"request_id": "first", "input_length": 16, "hash_ids": [1]},
            "request_id: expected a name that no earlier line",
        ),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: dict, words: str):
    header = {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 16, "hash_id_scope": "local"}
    good = {"request_id": "first", "play_id": "p", "session_id": "s", "input_length": 16, "hash_ids": [1]}
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(orjson.dumps(each, option=orjson.OPT_APPEND_NEWLINE) for each in (header, good, row)))
    with pytest.raises(ValueError, match=f"trace.jsonl:3: .*{words}"):
        read_log(path, LogSettings())
    log = read_log(path, LogSettings(bad_lines="skip"))
    assert log.requests == 1
    assert any("bad lines (" in note for note in log.notes)


def test_other_schema_is_refused(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"schema": "dynamo.agentic_mooncake", "version": 3, "block_size": 16}\n')
    with pytest.raises(ValueError, match=r"version: expected 2, not '?3"):
        read_log(path, LogSettings())

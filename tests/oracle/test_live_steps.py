"""Steps that a running vLLM 0.32.0 wrote, decided again by ours; the captures are of `benchmarks/rendezvous`."""

import gzip
from pathlib import Path

import orjson
import pytest

from spanlab.schedule import PRESETS, read_cases, schedule
from spanlab.study.servers.steps import FAULTS, Rendezvous, meet, other_release, read_run, write_case, write_last_run

CAPTURES = Path(__file__).with_name("live")
EQUAL = ["drafts", "hybrid", "tight"]
PRESET = "vllm_0_32"


def unpacked(name: str, folder: Path) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_bytes(gzip.decompress((CAPTURES / f"{name}.jsonl.gz").read_bytes()))
    return path


def lines_of(path: Path) -> list[dict]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def write(path: Path, lines: list[dict]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path


def equal(both: Rendezvous) -> tuple[int, int]:
    numbers = range(len(both.run.requests))
    return sum(map(both.same_reuse, numbers)), sum(map(both.same_course, numbers))


@pytest.mark.parametrize("name", EQUAL)
def test_every_decision_is_the_server_s(name: str, tmp_path: Path):
    both = meet(read_run(unpacked(name, tmp_path)), PRESET)
    count = len(both.run.requests)
    assert count > 30 and both.num_steps > 50
    assert (equal(both), both.differences) == ((count, count), ())


def test_captures_hold_what_they_are_for(tmp_path: Path):
    runs = {name: read_run(unpacked(name, tmp_path)) for name in EQUAL}
    assert sum(request.preemptions for request in runs["tight"].requests) > 0
    assert sum(proposed for request in runs["drafts"].requests for proposed, _ in request.drafts.values()) > 0
    assert runs["hybrid"].start.mamba_mode == "align"
    assert all(sum(request.reused or 0 for request in run.requests) > 0 for run in runs.values())


def test_hybrid_with_the_server_s_block_size_differs_by_a_known_fault(tmp_path: Path):
    both = meet(read_run(unpacked("hybrid_default", tmp_path)), PRESET)
    reuse, _ = equal(both)
    assert reuse < len(both.run.requests)
    assert FAULTS["block_size"].applies(both.run)


@pytest.mark.parametrize("name", EQUAL)
def test_other_faults_are_not_named(name: str, tmp_path: Path):
    run = read_run(unpacked(name, tmp_path))
    assert [fault for fault, known in FAULTS.items() if known.applies(run)] == []


@pytest.mark.parametrize(
    ("version", "other"), [("0.32.0", False), ("0.32.1", False), ("0.3.2", True), ("0.33.0", True)]
)
def test_server_of_another_release_is_named(version: str, other: bool, tmp_path: Path):
    path = unpacked("tight", tmp_path)
    lines = lines_of(path)
    lines[0]["version"] = version
    said = other_release(read_run(write(path, lines)), PRESET)
    assert said == other * (f"the server is vLLM {version}, decided as {PRESET}: expected the preset of its release",)


def test_step_that_computes_one_token_less_is_the_first_difference(tmp_path: Path):
    path = unpacked("tight", tmp_path)
    lines, plans = lines_of(path), 0
    for line in lines:
        if line["event"] == "plan" and line["tokens"]:
            request, tokens = next(iter(line["tokens"].items()))
            if plans > 20 and tokens > 100:
                line["tokens"][request] = tokens - 1
                break
            plans += 1
    first = meet(read_run(write(path, lines)), PRESET).differences[0]
    assert sum(first.decided.values()) - sum(first.served.values()) == 1


def test_request_that_reuses_a_block_less_is_the_one_that_differs(tmp_path: Path):
    path = unpacked("tight", tmp_path)
    lines = lines_of(path)
    plan = next(line for line in lines if line["event"] == "plan" and any(line["reused"].values()))
    request = next(name for name, reused in plan["reused"].items() if reused)
    plan["reused"][request] -= 32
    both = meet(read_run(write(path, lines)), PRESET)
    numbers = [number for number in range(len(both.run.requests)) if not both.same_reuse(number)]
    assert [both.run.requests[number].id for number in numbers] == [request]


def test_run_is_written_as_a_case_that_the_entry_schedule_decides_alike(tmp_path: Path):
    run = read_run(unpacked("drafts", tmp_path))
    write_case(run, tmp_path / "drafts.case.json")
    (case,) = read_cases(tmp_path / "drafts.case.json").values()
    decided = schedule(case, PRESETS[PRESET](case))
    assert decided.reused_on_admission == [request.reused for request in run.requests]
    assert decided.num_steps == len(run.steps)


def test_line_without_its_end_is_left_out(tmp_path: Path):
    path = unpacked("tight", tmp_path)
    count = len(read_run(path).requests)
    path.write_bytes(path.read_bytes() + b'{"event": "add", "id')
    assert len(read_run(path).requests) == count


def test_log_of_a_server_that_ended_among_requests_is_equal_until_then(tmp_path: Path):
    path = unpacked("tight", tmp_path)
    lines = lines_of(path)
    both = meet(read_run(write(path, lines[: len(lines) // 2])), PRESET)
    assert any(request.last is None for request in both.run.requests)
    count = len(both.run.requests)
    assert (equal(both), both.differences) == ((count, count), ())


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b'{"event": "done"}\n', r"jsonl:2: .*at is missing"),
        (b'{"event": "reset", "at": 1, "done": true}\n', "the cache was emptied while a run was served"),
    ],
)
def test_wrong_log_is_one_sentence(line: bytes, sentence: str, tmp_path: Path):
    path = unpacked("tight", tmp_path)
    start = path.read_bytes().split(b"\n", 1)[0] + b"\n"
    path.write_bytes(start + line)
    with pytest.raises(ValueError, match=sentence):
        read_run(path)


def test_last_run_begins_where_the_cache_was_emptied(tmp_path: Path):
    path = unpacked("tight", tmp_path)
    start, *events = path.read_bytes().splitlines(keepends=True)
    reset = b'{"event": "reset", "at": 1, "done": %s}\n'
    log = tmp_path / "log.jsonl"
    log.write_bytes(b"".join([start, *events[:9], reset % b"true", *events]))
    write_last_run(log, tmp_path / "last.jsonl")
    assert (tmp_path / "last.jsonl").read_bytes() == path.read_bytes()
    log.write_bytes(b"".join([start, *events[:9], reset % b"false", *events]))
    with pytest.raises(ValueError, match="expected a server whose cache was emptied before the run"):
        write_last_run(log, tmp_path / "last.jsonl")

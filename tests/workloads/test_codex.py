"""Rollout files of Codex: each call once, with its history and the provider's counts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spanlab.workloads.logs.log import Log
from spanlab.workloads.logs.read import LogSettings, read_log

from ..support.files import write_lines
from .agent_samples import CodexSession, clock, codex_session
from .test_claude_code import sums, texts


def read(folder: Path, rows: list[Any], **settings: Any) -> Log:
    return read_log(write_lines(folder / "rollout", *rows), LogSettings(**settings))


def test_each_call_counts_once(tmp_path: Path):
    log = read(tmp_path, codex_session())
    assert (log.format, log.requests) == ("codex", 2)
    assert sums(log) == (1640 - 768, 768, 0, 25)
    assert log.output_lens.tolist() == [20, 5]
    assert "not counted: 1 counts of tokens that repeat the one before" in log.notes


def test_prompt_is_the_history_before_the_call(tmp_path: Path):
    first, second = texts(read(tmp_path, codex_session()))
    assert first == "be brief and exact|user\nhow many files are there in the folder of the project?"
    assert second.startswith(f"{first}|assistant\n")
    assert second.endswith('|tool\na b c{"tool_call_id":"k1"}')


def test_tools_are_what_the_count_has_beyond_the_text(tmp_path: Path):
    log = read(tmp_path, codex_session())
    assert log.prompt_tokens[0] == 800
    assert log.pieces[log.starts[0]] == log.pieces[log.starts[1]]
    assert [*log.unread.left] == ["system prompt and tools, which the log does not have"]


def test_times_are_those_of_prompt_and_count(tmp_path: Path):
    log = read(tmp_path, codex_session())
    # lines at 1, 2, … s: user 3, call 4, count 5, output 6, message 7, count 8
    assert log.arrived_ns.tolist() == [0, 3_000_000_000]
    assert log.observed.last_token.tolist() == [2.0, 5.0]
    assert log.waits_ns.tolist() == [0, 1_000_000_000]


@pytest.mark.parametrize(("last", "totals"), [(True, True), (True, False), (False, True)])
def test_counts_are_read_from_either_field(tmp_path: Path, last: bool, totals: bool):
    session = CodexSession()
    for prompt in (100, 300):
        session.message("user", "go")
        session.message("assistant", "done")
        session.count(prompt, 64, 7, last=last, totals=totals)
    session.lines.append(dict(session.lines[-1]))
    assert sums(read(tmp_path, session.lines)) == (400 - 128, 128, 0, 14)


def test_equal_counts_of_two_calls_count_twice(tmp_path: Path):
    session = CodexSession()
    for _ in range(2):
        session.message("user", "go")
        session.message("assistant", "done")
        session.count(100, 64, 7)
    assert sums(read(tmp_path, session.lines)) == (72, 128, 0, 14)


def test_counts_without_items_of_the_model_are_calls(tmp_path: Path):
    session = CodexSession()
    for _ in range(3):
        session.message("user", "go")
        session.count(100, 64, 7, totals=False)
    assert sums(read(tmp_path, session.lines)) == (108, 192, 0, 21)


def test_call_without_a_count_has_unknown_usage(tmp_path: Path):
    session = CodexSession()
    session.message("user", "go")
    session.item("function_call", name="shell", arguments="{}", call_id="k1")
    session.item("function_call_output", call_id="k1", output="a")
    session.message("assistant", "done")
    session.count(100, 64, 7)
    session.message("user", "more")
    session.message("assistant", "cut off")
    log = read(tmp_path, session.lines)
    np.testing.assert_array_equal(log.usage[:, 0], [np.nan, 100, np.nan])


def test_counts_of_no_call_are_named(tmp_path: Path):
    session = CodexSession()
    session.line("event_msg", {"type": "token_count", "info": None, "rate_limits": {}})
    session.message("user", "go")
    session.message("assistant", "done")
    session.count(100, 64, 7)
    session.line("event_msg", {"type": "token_count", "info": {"last_token_usage": {"total_tokens": 9}}})
    log = read(tmp_path, session.lines)
    assert (log.requests, sums(log)) == (1, (36, 64, 0, 7))
    assert "not counted: 2 counts of tokens of no call" in log.notes


@pytest.mark.parametrize("has_history", [True, False])
def test_compaction_replaces_the_history(tmp_path: Path, has_history: bool):
    session = CodexSession()
    session.message("user", "a long story")
    session.message("assistant", "with an answer")
    session.count(100, 64, 7)
    history = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "kept"}]}]
    session.line("compacted", {"message": "in short"} | ({"replacement_history": history} if has_history else {}))
    session.message("user", "go on")
    session.message("assistant", "yes")
    session.count(50, 0, 1)
    log = read(tmp_path, session.lines)
    expected = "user\nkept" if has_history else "user\na long story|user\nin short"
    assert texts(log)[1] == f"be brief and exact|{expected}|user\ngo on"
    assert any("a compaction without" in note for note in log.notes) is not has_history


def test_first_version_is_read_without_usage(tmp_path: Path):
    rows = [line["payload"] for line in codex_session() if line["type"] == "response_item"]
    header = {"id": "c0", "timestamp": "2025-07-01T00:00:00Z", "instructions": "be brief and exact", "git": {}}
    log = read(tmp_path, [header, {"record_type": "state"}, {"text": "of the history of inputs"}, *rows])
    assert (log.format, log.requests, log.usage) == ("codex", 2, None)
    assert texts(log)[0] == "be brief and exact|user\nhow many files are there in the folder of the project?"
    assert "not counted: 1 lines of the type state" in log.notes
    assert "not counted: 1 lines of the type none" in log.notes


def test_encrypted_reasoning_and_unknown_items_are_counted(tmp_path: Path):
    session = CodexSession()
    session.message("user", "go")
    session.item("reasoning", summary=[], encrypted_content="x" * 99)
    session.item("hologram", payload="x" * 40)
    session.item("ghost_snapshot", ghost_commit={})
    session.message("assistant", "done")
    session.count(100, 64, 7)
    session.line("never_heard_of", {})
    session.line("event_msg", {"type": "agent_reasoning", "text": "hm"})
    session.message("user", "and?")
    session.message("assistant", "done")
    session.count(200, 64, 7)
    log = read(tmp_path, session.lines)
    assert {"encrypted reasoning", "hologram"} < set(log.unread.left)
    assert "not counted: 1 items of the type ghost_snapshot, which are not sent" in log.notes
    assert "not counted: 1 lines of the type never_heard_of" in log.notes
    assert "not counted: 1 lines of the type event_msg (agent_reasoning)" in log.notes


def test_folder_of_rollouts_is_one_log(tmp_path: Path):
    day = tmp_path / "sessions" / "2026" / "11" / "02"
    day.mkdir(parents=True)
    write_lines(day / "rollout-a.jsonl", *codex_session())
    other = CodexSession("c2")
    other.message("user", "how many files are there in the folder of the project?")
    other.message("assistant", "none")
    other.count(900, 512, 3)
    write_lines(day / "rollout-b.jsonl", *other.lines)
    log = read_log(tmp_path / "sessions", LogSettings())
    assert sums(log) == (1640 + 900 - 768 - 512, 768 + 512, 0, 28)
    assert sorted(log.sessions.tolist()) == [0, 0, 1]


def test_copy_of_a_file_repeats_no_call(tmp_path: Path):
    (tmp_path / "sessions").mkdir()
    for name in ("rollout-a.jsonl", "copy.jsonl"):
        write_lines(tmp_path / "sessions" / name, *codex_session())
    log = read_log(tmp_path / "sessions", LogSettings())
    assert (log.requests, sums(log)) == (2, (1640 - 768, 768, 0, 25))
    assert "not counted: 2 calls that another file has too" in log.notes


def test_fork_repeats_no_call_of_its_origin(tmp_path: Path):
    folder = tmp_path / "sessions"
    folder.mkdir()
    write_lines(folder / "rollout-z.jsonl", *codex_session())
    fork = CodexSession("c2")
    fork.lines = fork.lines[:1] + codex_session()
    fork.lines[0]["timestamp"] = clock(30)
    fork.lines[0]["payload"]["forked_from_id"] = "c1"
    fork.message("user", "and now?")
    fork.message("assistant", "done")
    for line in fork.lines[-2:]:
        line["timestamp"] = clock(40)
    fork.lines.append({**codex_session()[-1], "timestamp": clock(50)})
    usage = {"input_tokens": 900, "cached_input_tokens": 832, "output_tokens": 3}
    totals = {"input_tokens": 2540, "cached_input_tokens": 1600, "output_tokens": 28}
    fork.lines[-1]["payload"] = {
        "type": "token_count",
        "info": {"last_token_usage": usage, "total_token_usage": totals},
    }
    write_lines(folder / "rollout-a.jsonl", *fork.lines)
    log = read_log(folder, LogSettings())
    assert sums(log) == (1640 - 768 + 900 - 832, 768 + 832, 0, 28)
    assert "not counted: 2 calls that another file has too" in log.notes


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"timestamp": "2026-11-02T09:00:01Z", "type": "resp', "line: expected JSON"),
        ({"type": "response_item", "payload": 7}, "payload: expected an object, not 7"),
        ({"type": "event_msg", "payload": {}, "timestamp": "soon"}, "timestamp: expected a number or a date"),
        (
            {"type": "compacted", "payload": {"replacement_history": [7]}},
            "payload.replacement_history: expected a list",
        ),
        ({"type": "turn_context", "payload": {"model": {}}}, "model: expected a text or a number"),
    ],
)
def test_bad_line_is_named_or_skipped(tmp_path: Path, row: Any, problem: str):
    rows = [json.dumps(line) for line in codex_session()] + [row]
    with pytest.raises(ValueError, match=rf"rollout:{len(rows)}: {problem}"):
        read(tmp_path, rows)
    log = read(tmp_path, rows, bad_lines="skip")
    assert sums(log) == (1640 - 768, 768, 0, 25)
    assert any(f"bad lines ({problem.partition(':')[0]}, first in line {len(rows)})" in note for note in log.notes)

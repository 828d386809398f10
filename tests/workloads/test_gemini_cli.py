"""Sessions of Gemini CLI: each call once, with the history before it and the provider's own counts."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spanlab.workloads.logs.log import Log
from spanlab.workloads.logs.read import LogSettings, read_log

from ..support.files import write_lines
from .agent_samples import clock, gemini_message, gemini_session, gemini_tokens
from .test_claude_code import sums, texts

ASKED = "user\nwhich of the settings are read first?"


def read(folder: Path, *rows: Any, **settings: Any) -> Log:
    return read_log(write_lines(folder / "session", *rows), LogSettings(**settings))


def set_aside(log: Log) -> set[str]:
    return {note.removeprefix("not counted: ") for note in log.notes if note.startswith("not counted")}


def test_calls_have_the_counts_of_the_provider(tmp_path: Path):
    log = read(tmp_path, *gemini_session())
    assert (log.format, log.requests, sums(log)) == ("gemini_cli", 2, (900 + 940 - 880, 880, 0, 15))
    np.testing.assert_array_equal(log.usage, [[900, 0, np.nan], [940, 880, np.nan]])
    assert texts(log) == [ASKED, f"{ASKED}|assistant\nthose of the project|user\nand then?"]
    assert log.arrived_ns.tolist() == [0, 8_000_000_000]
    assert log.observed.last_token.tolist() == [2.0, 10.0]
    assert log.waits_ns.tolist() == [0, 6_000_000_000]
    assert log.prompt_tokens[0] == 900  # with the unseen system prompt


def test_session_that_is_one_object_reads_as_lines(tmp_path: Path):
    about, *messages = gemini_session()
    path = tmp_path / "session.json"
    path.write_text(json.dumps(about | {"messages": messages}, indent=2))
    log = read_log(path, LogSettings())
    assert (log.format, log.fingerprint) == ("gemini_cli", read(tmp_path, *gemini_session()).fingerprint)


def tool_call(name: str, second: float, answer: Any) -> dict[str, Any]:
    result = [{"functionResponse": {"id": name, "name": "look", "response": {"output": answer}}}]
    call = {"id": name, "name": "look", "args": {"at": "a"}, "status": "success", "displayName": "Look"}
    return call | {"result": result, "timestamp": clock(second)}


CALLED = '{"tool_calls":[{"id":"t1","type":"function","function":{"name":"look","arguments":{"at":"a"}}}]}'


def test_message_that_is_written_again_counts_once(tmp_path: Path):
    about, user, first, *_ = gemini_session()
    empty = first | {"content": "", "tokens": None}
    last = gemini_message("g2", 9, "gemini", "found", tokens=gemini_tokens(950, 880, 5))
    with_call = first | {"content": "", "toolCalls": [tool_call("t1", 7, "found it")]}
    log = read(tmp_path, about, user, empty, {"$set": {"lastUpdated": clock(3)}}, first, with_call, last)
    assert (log.requests, sums(log)) == (2, (900 + 70, 880, 0, 15))
    assert texts(log)[1] == f'{ASKED}|assistant\n{CALLED}|tool\n{{"output":"found it"}}{{"tool_call_id":"t1"}}'
    assert log.arrived_ns.tolist() == [0, 6_000_000_000]  # when the tool had answered


def test_step_back_takes_messages_out_of_the_history(tmp_path: Path):
    rows = [*gemini_session(), {"$rewindTo": "u2"}, gemini_message("u3", 20, "user", "and last?")]
    rows.append(gemini_message("g3", 22, "gemini", "none", tokens=gemini_tokens(930, 880, 2)))
    log = read(tmp_path, *rows)
    assert (log.requests, sums(log)) == (3, (900 + 60 + 50, 1760, 0, 17))
    assert texts(log)[2] == f"{ASKED}|assistant\nthose of the project|user\nand last?"
    assert set_aside(log) == {"2 messages that a step back took out of the history; calls among them count"}
    assert texts(read(tmp_path, *rows[:5], {"$rewindTo": "gone"}, *rows[6:]))[2] == "user\nand last?"


def test_history_that_is_replaced_is_that_of_later_calls(tmp_path: Path):
    about, user, first, *others = gemini_session()
    call = {"functionCall": {"id": "t1", "name": "look", "args": {"at": "a"}}}
    answer = {"functionResponse": {"id": "t1", "name": "look", "response": {"output": "masked"}}}
    history = [
        gemini_message("h1", 4, "user", [{"text": "in short"}]),
        first | {"content": [call], "toolCalls": [tool_call("t1", 4, "long")]},
        gemini_message("h2", 4, "user", [answer]),
    ]
    log = read(tmp_path, about, user, first, {"$set": {"messages": history}}, *others)
    assert (log.requests, sums(log)) == (2, (960, 880, 0, 15))
    expected = f'user\nin short|assistant\n{CALLED}|tool\n{{"output":"masked"}}{{"tool_call_id":"t1"}}|user\nand then?'
    assert texts(log)[1] == expected


def test_messages_without_counts_are_calls_of_unknown_usage(tmp_path: Path):
    about, user, first, second, last = gemini_session()
    log = read(tmp_path, about, user, first | {"tokens": None}, second, last)
    np.testing.assert_array_equal(log.usage[:, 0], [np.nan, 940])
    assert not log.unread.allows_verdict


def test_folder_of_sessions_has_each_call_once(tmp_path: Path):
    folder = tmp_path / "chats"
    (folder / "s1").mkdir(parents=True)
    about, *messages = gemini_session()
    (folder / "session-1.json").write_text(json.dumps(about | {"messages": messages}))
    write_lines(folder / "session-1.jsonl", about, *messages)
    agent = about | {"sessionId": "a1", "kind": "subagent", "startTime": clock(2)}
    asked, answered = gemini_message("u", 4, "user", "look"), gemini_message("g", 5, "gemini", "seen")
    write_lines(folder / "s1" / "a1.jsonl", agent, asked, answered | {"tokens": gemini_tokens(50, 0, 3)})
    (tmp_path / "logs.json").write_text(json.dumps([{"sessionId": "s1", "messageId": 0, "type": "user"}]))
    log = read_log(folder, LogSettings())
    assert (log.format, log.requests, sums(log)) == ("gemini_cli", 3, (960 + 50, 880, 0, 18))
    assert log.sessions.tolist() == [0, 1, 0]
    assert log.families.tolist() == [0, 0, 0]
    assert set_aside(log) == {"2 calls that another file has too"}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"id": "g3", "type": "gem', "line: expected JSON"),
        ({"id": "g3", "type": "gemini", "content": 7}, "content: expected a text or a list of parts, not '7'"),
        ({"id": "g3", "type": "gemini", "content": [7]}, "content: expected a text or a list of parts, not '7'"),
        ({"id": "g3", "type": "gemini", "toolCalls": 7}, "toolCalls: expected a list of objects, not '7'"),
        ({"id": "g3", "type": "gemini", "tokens": 7}, "tokens: expected an object with counts, not '7'"),
        ({"id": "g3", "type": "gemini", "timestamp": "soon"}, "timestamp: expected a number or a date"),
        ({"$set": 7}, r"\$set: expected an object, not '7'"),
        ({"$set": {"messages": [7]}}, "messages: expected a list of objects"),
    ],
)
def test_bad_line_is_named_or_skipped(tmp_path: Path, row: Any, problem: str):
    with pytest.raises(ValueError, match=rf"session:6: {problem}"):
        read(tmp_path, *gemini_session(), row)
    log = read(tmp_path, *gemini_session(), row, bad_lines="skip")
    assert sums(log) == (960, 880, 0, 15)
    assert any("bad lines" in note and "(1 times" in note for note in log.notes)


@pytest.mark.parametrize("seed", range(10))
def test_sums_are_those_of_the_messages_of_the_model(tmp_path: Path, seed: int):
    draw = random.Random(seed)
    rows, total = [gemini_session()[0]], np.zeros(3, dtype=int)
    for number in range(draw.randrange(1, 20)):
        prompt = draw.randrange(100, 900)
        cached, output, thoughts, tool = (draw.randrange(90) for _ in range(4))
        total += [prompt + tool - cached, cached, output + thoughts]
        rows.append(gemini_message(f"u{number}", 10 * number, "user", f"ask {number}"))
        answer = gemini_message(f"g{number}", 10 * number + 5, "gemini", "x")
        tokens = gemini_tokens(prompt, cached, output, thoughts, tool)
        rows += [answer | {"tokens": None}] * draw.randrange(2) + [answer | {"tokens": tokens}] * draw.randrange(1, 3)
        rows += [gemini_message(f"i{number}", 10 * number, "info", "x")] * draw.randrange(2)
        if draw.random() < 0.2:
            rows.append({"$rewindTo": f"u{draw.randrange(number + 1)}"})
    fresh, cached, output = total.tolist()
    assert sums(read(tmp_path, *rows)) == (fresh, cached, 0, output)

"""Trajectories and ShareGPT: each answer of a model is a request with the messages before it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spanlab.workloads.logs.log import Log
from spanlab.workloads.logs.read import LogSettings, read_log

from ..support.files import write_lines
from ..support.shared import TRACES, needs
from .test_claude_code import sums, texts

SHAREGPT = TRACES / "agents" / "sharegpt-json" / "dummy_conversation.json"


def read(folder: Path, *rows: Any, **settings: Any) -> Log:
    return read_log(write_lines(folder / "file", *rows), LogSettings(**settings))


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | more


def step(query: list[dict[str, Any]], seconds: float, **more: Any) -> dict[str, Any]:
    return {"action": "ls", "observation": "a", "response": "I look", "execution_time": seconds, "query": query} | more


HISTORY = [
    said("system", "fix it", agent="main", message_type="system_prompt"),
    said("user", "an example", is_demo=True),
    said("assistant", "its answer", is_demo=True),
    said("user", "the task", agent="main"),
    said("assistant", "I look", thought="I look", action="ls", tool_calls=[{"id": "k", "function": {"name": "bash"}}]),
    said("tool", [{"type": "text", "text": "a b"}], tool_call_ids=["k"], agent="main"),
    said("assistant", "done", action="submit"),
]
CALL = '{"tool_calls":[{"id":"k","function":{"name":"bash"}}]}'
LAST = (
    f"system\nfix it|user\nan example|assistant\nits answer|user\nthe task|assistant\nI look{CALL}|"
    'tool\na b{"tool_call_id":"k"}'
)


def test_history_gives_the_prompts_of_swe_agent(tmp_path: Path):
    steps = [{"action": "ls", "execution_time": 3.5}, {"action": "submit", "execution_time": 0.5}]
    log = read(tmp_path, {"trajectory": steps, "history": HISTORY, "info": {"model_stats": {"api_calls": 3}}})
    assert (log.format, log.requests) == ("trajectory", 2)
    assert texts(log)[1] == LAST
    assert log.waits_ns.tolist() == [0, 3_500_000_000]
    assert log.output_lens.tolist() == [-(-len("I look" + '[{"id": "k", "function": {"name": "bash"}}]') // 4), 1]
    assert log.unread.left == {}
    assert "not counted: 1 calls that model_stats counts beyond those of the trajectories" in log.notes


def test_query_of_a_step_is_its_prompt(tmp_path: Path):
    steps = [step(HISTORY[:1], 2.0), step([{}], 0.0), step([*HISTORY[:1], said("user", "and?")], 1.0)]
    document = tmp_path / "file.traj"
    document.write_text(json.dumps({"environment": "e", "trajectory": steps, "history": HISTORY, "info": {}}, indent=2))
    log = read_log(document, LogSettings())
    assert texts(log) == ["system\nfix it", "system\nfix it|user\nand?"]
    assert "not counted: 1 steps without a call of the model" in log.notes


def test_attempts_and_lists_of_messages_are_read(tmp_path: Path):
    turns = [{"role": "system", "text": "fix it"}, {"role": "user", "text": "task"}, {"role": "ai", "text": "done"}]
    log = read(tmp_path, {"attempts": [{"trajectory": turns, "info": {}}, {"trajectory": turns, "info": {}}]})
    assert texts(log) == ["system\nfix it|user\ntask"] * 2


def test_mini_swe_agent_has_usage_and_times(tmp_path: Path):
    def answer(second: int, prompt: int, cached: int, output: int) -> dict[str, Any]:
        usage = {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}}
        usage["completion_tokens"] = output
        return said("assistant", "ok", extra={"timestamp": 1_793_600_000 + second, "response": {"usage": usage}})

    messages = [
        said("system", "fix it"),
        said("user", "task", extra={"timestamp": 1_793_600_000}),
        answer(4, 50, 0, 7),
        said("user", "output of the tool", extra={"timestamp": 1_793_600_010}),
        answer(12, 70, 48, 9),
        said("exit", "submitted"),
    ]
    info = {"model_stats": {"api_calls": 2, "instance_cost": 0.1}, "exit_status": "submitted"}
    log = read(tmp_path, {"info": info, "messages": messages, "trajectory_format": "mini-swe-agent-1"})
    assert (log.format, log.requests, sums(log)) == ("trajectory", 2, (72, 48, 0, 16))
    assert log.arrived_ns.tolist() == [0, 10_000_000_000]
    assert log.waits_ns.tolist() == [0, 6_000_000_000]
    assert texts(log)[0] == "system\nfix it|user\ntask"
    assert "not counted: 1 messages of the role exit, which are not sent" in log.notes


def test_whole_responses_of_mini_swe_agent_are_read(tmp_path: Path):
    call = {"type": "function_call", "name": "bash", "arguments": "{}", "call_id": "k"}
    usage = {"input_tokens": 50, "input_tokens_details": {"cached_tokens": 16}, "output_tokens": 7}
    messages = [
        said("user", "task"),
        {"object": "response", "output": [call], "usage": usage, "extra": {"timestamp": 5.0}},
        {"type": "function_call_output", "call_id": "k", "output": "a b", "extra": {"raw": "x"}},
        {"object": "response", "output": [said("assistant", "done", type="message")], "usage": usage},
    ]
    log = read(tmp_path, {"info": {"model_stats": {}}, "messages": messages})
    assert sums(log) == (68, 32, 0, 14)
    assert texts(log)[1].endswith('|tool\na b{"tool_call_id":"k"}')


def test_folder_of_trajectories_is_one_log(tmp_path: Path):
    folder = tmp_path / "runs"
    for name in ("one", "two"):
        (folder / name).mkdir(parents=True)
        data = {"trajectory": [step(HISTORY[:1], 1.0)], "history": [], "info": {}}
        (folder / name / f"{name}.traj").write_text(json.dumps(data))
    (folder / "preds.json").write_text('{"one": {"model_patch": "x"}}')
    (folder / "broken.json").write_text('{"one": \n')
    log = read_log(folder, LogSettings())
    assert (log.format, log.requests, log.sessions.tolist()) == ("trajectory", 2, [0, 1])
    assert "not counted: 2 files of the folder that are no trajectories" in log.notes


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"trajectory": [', "line: expected JSON"),
        ({"trajectory": 7}, "trajectory: expected a list of objects, not '7'"),
        ({"trajectory": [{}], "history": 7}, "history: expected a list of objects, not '7'"),
        ({"trajectory": [{"query": 7}]}, r"trajectory\[0\].query: expected a list of objects"),
        ({"trajectory": [step([said("user", "x")], -1)]}, "execution_time: expected a number from 0"),
    ],
)
def test_bad_trajectory_is_named_or_skipped(tmp_path: Path, row: Any, problem: str):
    good = {"trajectory": [step(HISTORY[:1], 1.0)], "info": {}}
    with pytest.raises(ValueError, match=f"file:2: {problem}"):
        read(tmp_path, good, row)
    log = read(tmp_path, good, row, bad_lines="skip")
    assert log.requests == 1
    assert any("bad lines" in note and "(1 times" in note for note in log.notes)


def test_copies_of_trajectories_count_once_where_an_id_shows_it(tmp_path: Path):
    whole = {"trajectory": [step(HISTORY[:1], 1.0), step(HISTORY[:2], 1.0)], "history": [], "info": {}}
    part = whole | {"trajectory": whole["trajectory"][:1]}
    for name, data in {"a/one": whole, "b/one": whole, "c/one": part, "c/two": whole}.items():
        (tmp_path / "runs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / f"{name}.traj").write_text(json.dumps(data))
    log = read_log(tmp_path / "runs", LogSettings())
    assert log.requests == 5  # two of a/one, one of c/one, two of c/two
    assert "not counted: 1 records that repeat an earlier one, with its id" in log.notes
    assert "1 records that equal an earlier one count, since they have no id or another one" in log.notes
    assert "1 calls that equal one of another record with the same id count, since calls have no ids" in log.notes


def test_ids_of_answers_tell_copies(tmp_path: Path):
    def answer(name: str) -> dict[str, Any]:
        return said("assistant", "ok", extra={"timestamp": 5.0, "response": {"id": name}})

    rows = [
        {"info": {"model_stats": {}}, "messages": [said("user", "task"), answer(name)], "run": run}
        for run, name in enumerate(["r1", "r2", "r1"])
    ]
    log = read(tmp_path, *rows)
    assert log.requests == 2
    assert "not counted: 1 requests that repeat an earlier one" in log.notes


def test_conversations_count_once_if_they_have_ids(tmp_path: Path):
    rows = [{"id": name, "conversations": turns("hi", "ho")} for name in ("a", "a", "b")]
    nameless = [{"conversations": turns("you", "me")}] * 2
    log = read(tmp_path, *rows, *nameless)
    assert log.requests == 4
    assert "not counted: 1 records that repeat an earlier one, with its id" in log.notes
    assert "1 records that equal an earlier one count, since they have no id or another one" in log.notes


def turns(*contents: str) -> list[dict[str, str]]:
    """Return turns by turns of a user and a model."""
    return [{"from": ("human", "gpt")[index % 2], "value": content} for index, content in enumerate(contents)]


def test_each_answer_of_a_conversation_is_a_request(tmp_path: Path):
    log = read(tmp_path, {"id": "a", "conversations": turns("one?", "yes, it is", "two?", "no", "three?")})
    assert (log.format, log.ids, texts(log)) == (
        "sharegpt",
        "content",
        ["user\none?", "user\none?|assistant\nyes, it is|user\ntwo?"],
    )
    assert log.output_lens.tolist() == [3, 1]
    assert log.sessions.tolist() == [0, 0]
    assert "not counted: 1 turns at the end of a conversation without an answer" in log.notes


@pytest.mark.parametrize(
    "row",
    [
        {"items": [{"from": "system", "value": "be kind"}, *turns("hi", "ho")]},
        {"system": "be kind", "conversations": turns("hi", "ho")},
        {"conversation": [said("system", "be kind"), said("user", "hi"), said("assistant", "ho")]},
    ],
)
def test_other_names_of_turns_are_read(tmp_path: Path, row: dict[str, Any]):
    path = tmp_path / "file.json"
    path.write_text(json.dumps([row], indent=1))
    log = read_log(path, LogSettings())
    assert (log.format, texts(log)) == ("sharegpt", ["system\nbe kind|user\nhi"])


def test_answer_without_a_question_is_counted(tmp_path: Path):
    log = read(tmp_path, {"conversations": turns("hi", "ho")}, {"conversations": [*turns("hi", "ho")[::-1]]})
    assert log.requests == 1
    assert "not counted: 1 answers at the beginning of a conversation, without a question" in log.notes


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"conversations": [', "line: expected JSON"),
        ({"conversations": 7}, "conversations: expected a list of turns with from and value, not '7'"),
        ({"conversations": [*turns("x"), 7]}, r"conversations\[1\]: expected an object with from and value, not '7'"),
        ({"conversations": [{"from": "whale", "value": "x"}]}, r"conversations\[0\].from: expected human, gpt, system"),
        ({"conversations": [{"from": "gpt", "value": 7}]}, r"conversations\[0\].value: expected a text, not '7'"),
    ],
)
def test_bad_conversation_is_named_or_skipped(tmp_path: Path, row: Any, problem: str):
    with pytest.raises(ValueError, match=f"file:2: {problem}"):
        read(tmp_path, {"conversations": turns("hi", "ho")}, row)
    log = read(tmp_path, {"conversations": turns("hi", "ho")}, row, bad_lines="skip")
    assert log.requests == 1
    assert any("bad lines" in note and "(1 times" in note for note in log.notes)


@needs(SHAREGPT)
def test_recorded_conversations_are_read():
    log = read_log(SHAREGPT, LogSettings())
    data = json.loads(SHAREGPT.read_text())
    answers = [turn["value"] for each in data for turn in each["conversations"] if turn["from"] == "gpt"]
    assert (log.format, log.requests, len(np.unique(log.sessions))) == ("sharegpt", len(answers), len(data))
    assert log.output_lens.sum() == sum(-(-len(answer.encode()) // 4) for answer in answers)

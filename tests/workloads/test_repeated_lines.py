"""Lines that repeat messages: the same values as of a whole line, of objects that lines share."""

import json
import random
from typing import Any

import orjson
import pytest

from spanlab.workloads.logs import repeated_lines
from spanlab.workloads.logs.repeated_lines import RepeatedLines


def message(draw: random.Random) -> dict[str, Any]:
    content = "".join(draw.choices('ab"\\\n}]{[,é\u2028😀', k=draw.randrange(400)))
    return {"role": draw.choice(["user", "tool"]), "content": content, "messages": [draw.random(), {"input": [{}]}]}


@pytest.mark.parametrize("seed", range(4))
def test_lines_have_the_values_of_whole_lines(monkeypatch: pytest.MonkeyPatch, seed: int):
    draw, lines = random.Random(seed), RepeatedLines()
    monkeypatch.setattr(repeated_lines, "_WINDOW", 8)
    monkeypatch.setattr(repeated_lines, "_CONVERSATIONS", 2)
    conversations: list[list[dict[str, Any]]] = [[] for _ in range(3)]
    shared = 0
    for number in range(120):
        messages = draw.choice(conversations)
        if draw.random() < 0.1:
            messages[draw.randrange(len(messages) + 1) :] = []
        messages += [message(draw) for _ in range(draw.randrange(3))]
        misleading = {"tools": [{"messages": [{}]}]} if draw.random() < 0.2 else {}
        body = misleading | {draw.choice(["messages", "input"]): messages}
        row = {"at": number} | draw.choice([body, {"body": body}, {"request": {"body": body}}, {"x": body}])
        separators = draw.choice([None, (",", ":"), (" , ", " : ")])
        line = json.dumps(row, ensure_ascii=draw.random() < 0.5, separators=separators).encode()
        assert lines.loads(line) == orjson.loads(line)
        shared += lines.shares
    assert shared > 20


def test_messages_of_a_conversation_are_the_same_objects():
    lines, messages = RepeatedLines(), [{"role": "user", "content": "x" * 300} for _ in range(4)]
    bodies = [{"at": count, "messages": messages[:count]} for count in (3, 4)]
    first, second = (lines.loads(orjson.dumps(body))["messages"] for body in bodies)
    assert [one is other for one, other in zip(first, second, strict=False)] == [True] * 3


@pytest.mark.parametrize(
    "text",
    [
        '{"messages": [{"a": 1}, {"b": NaN}]}',
        '{"messages": [{"a": 1} {"b": 2}]}',
        '{"messages": [{"a": 1},]}',
        '{"messages": [{"a": 1}], "b": }',
        '{"messages": [{"a": "\\ud800"}]}',
        '{"messages": [{"a": 1}',
    ],
)
def test_damaged_line_is_refused(text: str):
    with pytest.raises(orjson.JSONDecodeError):
        RepeatedLines().loads(text.encode())

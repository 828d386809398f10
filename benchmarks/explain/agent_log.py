"""Write the log of an invented agent that works on this repository, with the counts of a simulated provider.

    .venvs/sim/bin/python benchmarks/explain/agent_log.py outputs/logs/agent.jsonl

A line is one call as Anthropic has it, with `usage`. Texts are those of this file, and files of this repository at
their present commit, so that they may be shown. Four conversations run at the same time. Each question of the user
begins a turn of several calls of tools. Three things happen that also happen in logs of real agents:

    the system prompt has the time of the last question
    a tool runs for minutes, or the user thinks for minutes, so that the provider's entries expire
    a conversation that is longer than MOST_TOKENS goes on from a summary

The provider keeps prefixes for 300 seconds after their last use, finds the longest one, to the character, and
stores every prompt whole. Four bytes count as one token.
"""

from __future__ import annotations

import json
import random
import sys
from bisect import bisect_left
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BEGIN = datetime(2026, 11, 2, 9, 0, tzinfo=UTC).timestamp()
TTL_S, LEAST_TOKENS = 300.0, 1024
MOST_TOKENS = 40_000
QUESTIONS, CALLS, LINES = 6, 7, 120  # questions of a conversation, calls of a question, lines that a tool returns
TOKENS_PER_S = 60.0
RULES = """You are an agent that maintains spanlab, a laboratory for the reuse of KV caches.
Read a file before you change it, and keep each change as small as its purpose allows.
The time of the last question is {now}.
Run the tests of the files that you change. Say which of them you ran, and what they printed.
A claim about speed needs a measurement: name its command, its commit and the machine.
Never change a published number by hand. Publish the run again.
Write plain English, and sentences of at most twenty words.
A refused input gets one sentence with the key, the value and what is expected.
Ask the user if a request can be read in two ways. Otherwise decide, and say what you decided.
"""
TOOLS = {
    "read_file": "Return lines of a file of the repository, with their numbers.",
    "search": "Return the lines of the repository that match a regular expression, with file and line number.",
    "edit_file": "Replace a text of a file by another one. The text must occur once.",
    "run_tests": "Run the tests below a path, and return the last lines of their output.",
    "git_log": "Return the last commits that changed a path, with their messages.",
}
ASKED = (
    "Where is {file} used, and what would break if its first function raised?",
    "Shorten {file} without a change of its behaviour.",
    "Does a test fail if the first check of {file} is left out? Write one if not.",
    "Explain {file} to a new developer in ten sentences.",
)


def calls_of(conversation: int, files: list[Path]) -> Iterator[dict[str, Any]]:
    """Yield the calls of a conversation, with the times at which they arrive and end."""
    draw = random.Random(conversation)
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    tools = [{"name": name, "description": says, "input_schema": schema} for name, says in TOOLS.items()]
    at, messages = BEGIN + 97.0 * conversation, list[dict[str, Any]]()
    for question in range(QUESTIONS):
        file = draw.choice(files).relative_to(ROOT)
        now = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        messages.append({"role": "user", "content": draw.choice(ASKED).format(file=file)})
        for call in range(CALLS):
            system = RULES.format(now=now)
            if len(json.dumps(messages)) // 4 > MOST_TOKENS:
                says = f"Summary of the conversation so far: the user asked about {file}, and tools returned its text."
                messages = [{"role": "user", "content": says}]
            output = draw.randrange(60, 400)
            body = {"model": "agent", "system": system, "tools": tools, "messages": list(messages), "max_tokens": 4096}
            yield {"session_id": f"conversation {conversation}", "timestamp": round(at, 3), **body, "output": output}
            at += 1.5 + output / TOKENS_PER_S
            name = draw.choice(list(TOOLS))
            use = {"type": "tool_use", "id": f"call {conversation} {question} {call}", "name": name}
            messages.append({"role": "assistant", "content": [use | {"input": {"path": str(file)}}]})
            result = {"type": "tool_result", "tool_use_id": use["id"], "content": excerpt(draw.choice(files), draw)}
            messages.append({"role": "user", "content": [result]})
            at += draw.choice((0.2, 0.4, 2.0, 25.0, 380.0)) if name == "run_tests" else 0.3
        messages.append({"role": "assistant", "content": f"I have read {file}. Here is what I found, and what I did."})
        at += draw.choice((20.0, 45.0, 90.0, 1200.0))


def excerpt(path: Path, draw: random.Random) -> str:
    """Return some lines of a file, with their numbers."""
    lines = path.read_text(encoding="utf-8").splitlines()
    first = draw.randrange(max(1, len(lines) - LINES))
    return "\n".join(f"{number:5} {line}" for number, line in enumerate(lines[first : first + LINES], first + 1))


def with_usage(calls: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the calls with what the provider counts."""
    seen: list[tuple[float, str]] = []
    for call in calls:
        text = "".join(json.dumps(call[part], ensure_ascii=False) for part in ("tools", "system", "messages"))
        alive = [other for at, other in seen if call["timestamp"] - at <= TTL_S]
        tokens, found = len(text.encode()) // 4, max((shared(text, other) for other in alive), default=0)
        cached = len(text[:found].encode()) // 4
        cached = min(cached, tokens - 1) if cached >= LEAST_TOKENS else 0
        seen.append((call["timestamp"], text))
        usage = {"cache_read_input_tokens": cached, "cache_creation_input_tokens": tokens - cached - 1}
        counts = {"input_tokens": 1, **usage, "output_tokens": call.pop("output")}
        yield {**call, "response": {"usage": counts}}


def shared(text: str, other: str) -> int:
    """Return the length of the common beginning of two texts."""
    return bisect_left(range(min(len(text), len(other))), True, key=lambda size: text[: size + 1] != other[: size + 1])


def main(path: Path) -> None:
    """Write the log."""
    files = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "src" / "spanlab" / "core").glob("*.py")])
    calls = sorted((call for each in range(4) for call in calls_of(each, files)), key=lambda call: call["timestamp"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(call, ensure_ascii=False)}\n" for call in with_usage(calls)), "utf-8")
    print(f"{path}: {len(calls)} calls")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Write a long log of invented agents, to measure how much time and memory `explain` takes.

    .venvs/sim/bin/python benchmarks/explain/long_log.py outputs/logs/long.jsonl 10000 140000

The arguments are a file, the number of calls, and their mean tokens, at four bytes each. Eight sessions run at the same
time. Each call repeats its session's messages and adds an answer and the result of a tool. Every third session has a
time stamp in its system prompt, and some histories are replaced by a summary. Words are drawn from the pages of docs.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

SESSIONS, CALLS, BYTES_PER_TOKEN = 8, 100, 4  # sessions at the same time, mean calls of a session
FRONT = 30_000  # bytes of tools and system prompt
DEPTH, BESIDE = 31, 800  # mean calls since the last summary, and bytes that each adds beside the result of its tool
WORDS = [
    word for path in (Path(__file__).resolve().parents[2] / "docs").glob("*.md") for word in path.read_text().split()
]


def text_of(draw: random.Random, lines: list[str], size: float) -> str:
    """Return lines of at least `size` bytes, of which some begin with a number that no other has."""
    chosen: list[str] = []
    while size > 0:
        number = f"{draw.randrange(10**9)} " if draw.random() < 0.1 else ""
        chosen.append(number + draw.choice(lines))
        size -= len(chosen[-1]) + 1
    return "\n".join(chosen)


def session(number: int, draw: random.Random, lines: list[str], growth: float) -> Iterator[str]:
    """Yield the bodies of a session's calls as JSON, without their last brace."""
    rules, tools = (random.Random(seed) for seed in (number % 3, 3))
    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    functions = [
        {"name": f"tool_{k}", "description": text_of(tools, lines, 900), "parameters": schema} for k in range(20)
    ]
    names = {"model": "agent", "user": f"user {number % 5}", "session_id": f"session {number}"}
    head = json.dumps(names | {"tools": [{"type": "function", "function": each} for each in functions]})[:-1]
    first, second = text_of(rules, lines, 2000), text_of(rules, lines, 7000)
    messages: list[str] = []
    for call in range(draw.randrange(CALLS // 2, CALLS + CALLS // 2)):
        if call % 10 == 0:
            now = f"2026-11-{1 + call % 28:02} {number % 24:02}:{call % 60:02}:00"
            messages.append(json.dumps({"role": "user", "content": text_of(draw, lines, 400)}))
        stamp = f"The time is {now}.\n" if number % 3 == 0 else ""
        system = json.dumps({"role": "system", "content": f"{first}\n{stamp}{second}"})
        yield f'{head}, "messages": [{", ".join([system, *messages])}]'
        if draw.random() < 0.02 and len(messages) > 20:
            summary = f"Summary of the conversation so far: {text_of(draw, lines, 3000)}"
            messages = [json.dumps({"role": "user", "content": summary})]
        use = {"id": f"call {number} {call}", "type": "function", "function": {"name": "tool_3", "arguments": "{}"}}
        answer = {"role": "assistant", "content": text_of(draw, lines, 300), "tool_calls": [use]}
        result = {"role": "tool", "tool_call_id": use["id"], "content": text_of(draw, lines, growth)}
        messages += [json.dumps(answer), json.dumps(result)]


def main(path: Path, calls: int, tokens: int) -> None:
    """Write the log."""
    draw = random.Random(0)
    lines = [" ".join(draw.choices(WORDS, k=draw.randrange(4, 22))) for _ in range(40_000)]
    growth = max(200.0, (BYTES_PER_TOKEN * tokens - FRONT) / DEPTH - BESIDE)
    running: list[Iterator[str]] = []
    started, written, at = 0, 0, 1_793_600_000.0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        while written < calls:
            while len(running) < SESSIONS:
                running.append(session(started, draw, lines, growth))
                started += 1
            chosen = draw.choice(running)
            body = next(chosen, None)
            if body is None:
                running.remove(chosen)
                continue
            at += draw.expovariate(2)
            written += 1
            count = len(body) // BYTES_PER_TOKEN
            usage = {
                "prompt_tokens": count,
                "completion_tokens": 200,
                "prompt_tokens_details": {"cached_tokens": count // 2},
            }
            file.write(f'{body}, "timestamp": {at:.3f}, "usage": {json.dumps(usage)}}}\n')
    print(f"{path}: {written:,} calls, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

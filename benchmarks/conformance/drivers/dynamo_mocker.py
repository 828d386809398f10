"""NVIDIA's mocker (PyPI `ai-dynamo-runtime`) as a driver of `conformance_cases`.

    PYTHON -m pip install --no-deps ai-dynamo-runtime==1.6.1 ai-dynamo==1.6.1
    bash runall.sh -cn conformance_cases driver='PYTHON benchmarks/conformance/drivers/dynamo_mocker.py'

It replays a trace of block ids, in which the tokens of answers are not known. Its steps have durations of its own, so
that requests can come one after another, or all at the beginning, but not at a step.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from dynamo._core import run_mocker_trace_replay  # type: ignore[import-not-found, unused-ignore]

ANSWER_TOKENS = 20  # smaller ids are those of answers
APART_MS = 10_000_000
KEY = ("arrival_time_ms", "input_length", "requested_output_length")
#: Settings of a case without which it is plain, with the values that the mocker has.
PLAIN = {"mamba_mode": None, "groups": None, "draft_tokens": 0, "async_scheduling": False, "policy": "fcfs",
         "retention": None, "enable_chunked_prefill": True, "long_prefill_token_threshold": 0,
         "long_prefill_token_threshold_adaptive": False}  # fmt: skip


def unsupported(case: dict[str, Any]) -> str | None:
    """Return what of a case the mocker, its trace or its report does not have."""
    for key, value in PLAIN.items():
        if case["settings"].get(key, value) != value:
            return key
    requests = case["requests"]
    if any(request.get("cache_salt") or request.get("abort_step") is not None for request in requests):
        return "salts and aborts"
    if any(min(request["tokens"]) < ANSWER_TOKENS for request in requests):
        return "prompts that contain answers"
    if not case["kind"].startswith(("one at a time", "all at once")):
        return "arrival at a step"
    return None if len(set(keys_of(case))) == len(requests) else "equal lengths: its rows have no names"


def keys_of(case: dict[str, Any]) -> list[tuple[int, ...]]:
    """Return arrival and lengths of each request, by which rows of the report are known."""
    return [(row["timestamp"], row["input_length"], row["output_length"]) for row in trace(case)]


def trace(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the requests as a Mooncake trace: equal ids for equal beginnings."""
    size, ids = case["settings"]["block_size"], dict[tuple[int, ...], int]()
    alone = case["kind"].startswith("one at a time")
    return [
        {
            "timestamp": number * APART_MS if alone else 0,
            "input_length": len(request["tokens"]),
            "output_length": request["output_len"],
            "hash_ids": [
                ids.setdefault(tuple(request["tokens"][: start + size]), len(ids))
                for start in range(0, len(request["tokens"]), size)
            ],
        }
        for number, request in enumerate(case["requests"])
    ]


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Return reuse at the first admission, and preemptions."""
    settings = case["settings"]
    engine = {"backend": "vllm", "num_gpu_blocks": settings["num_blocks"] - 1} | {
        key: settings[key] for key in ("block_size", "max_num_seqs", "max_num_batched_tokens")
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in trace(case)))
        replay = run_mocker_trace_replay(
            [str(path)], {"engine": engine}, trace_block_size=settings["block_size"], capture_per_request=True
        )
    by_key = {tuple(row[name] for name in KEY): row for row in replay.per_request}
    rows = [by_key[key] for key in keys_of(case)]
    reused = [row["admission_history"][0]["reused_input_tokens"] for row in rows]
    return {"reused": reused, "preemptions": sum(row["readmission_count"] for row in rows)}


answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the library prints goes to stderr
for line in sys.stdin:
    case = json.loads(line)
    why = unsupported(case)
    claims = answer(case) if why is None else {"unsupported": why}
    print(json.dumps({"name": case["name"], **claims}), file=answers, flush=True)

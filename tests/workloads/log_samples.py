"""Two requests in every log format; they share the first 32 of 40 and 48 tokens if the format has ids."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import msgpack
import pyarrow
from pyarrow import parquet

from .agent_samples import claude_session, codex_session, gemini_session
from .cloud_samples import converse_lines, gemini_lines, helicone_lines, invocations, openrouter_lines, portkey_lines
from .span_samples import langfuse_lines, litellm_lines, otel_lines

FIRST = [*range(32), *range(100, 108)]
SECOND = [*range(32), *range(200, 216)]


def lines(*rows: dict) -> bytes:
    return b"\n".join(json.dumps(row).encode() for row in rows) + b"\n"


def table(*rows: list) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def _agentic(name: str, tokens: int, ids: list[int], at: int, *after: str) -> dict:
    waits = [{"request_id": other, "trigger": "completion", "delay_ms": 0, "relation": "sequence"} for other in after]
    row = {"request_id": name, "play_id": "p0", "session_id": "s0", "model": "m", "not_before_ms": at}
    return row | {"input_length": tokens, "output_length": 5, "hash_ids": ids, "dependencies": waits}


def _parquet() -> bytes:
    sink = io.BytesIO()
    columns = {"group_id": ["a", "a"], "idx": [0, 1], "tokens": [FIRST, SECOND], "n_tokens": [40, 48]}
    parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue()


def _events() -> bytes:
    def stored(blocks: list[int], parent: int | None) -> list:
        return ["BlockStored", blocks, parent, [], 16, None]

    batches = [
        [1.0, [stored([11, 12], None)], 0],
        [2.0, [stored([21], 12), ["BlockRemoved", [21]]], 0],
        [3.0, [stored([31], 12)], 0],
    ]
    return b"".join(msgpack.packb(batch) for batch in batches)


def _maps(frames: bool) -> bytes:
    """Return the events as today's servers send them, with all three frames of a message or its payload alone."""

    def stored(blocks: list[int], parent: int | None) -> dict:
        return {
            "type": "BlockStored",
            "block_hashes": blocks,
            "parent_block_hash": parent,
            "token_ids": [],
            "block_size": 16,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * len(blocks),
            "group_idx": 0,
        }

    events = [
        [stored([11, 12], None)],
        [stored([21], 12), {"type": "BlockRemoved", "block_hashes": [21]}],
        [stored([31], 12)],
    ]
    payloads = [msgpack.packb([time + 1.0, batch, 0]) for time, batch in enumerate(events)]
    if not frames:
        return b"".join(payloads)
    return b"".join(b"kv" + number.to_bytes(8, "big") + payload for number, payload in enumerate(payloads))


WORDS = "the same long opening of a chat that both of the requests begin with, word by word, to the end of it"
TEXT_LOG = "\n".join(
    f"[2026-11-01 10:00:0{index}] Finish: obj=GenerateReqInput(rid='{index}', input_ids={ids}), "
    f"out={{'meta_info': {{'completion_tokens': 7}}}}"
    for index, ids in enumerate((FIRST, SECOND))
)

#: Bytes of a log, by format and special case.
SAMPLES: dict[str, Callable[[], bytes]] = {
    "mooncake": lambda: lines(
        {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 3000, "input_length": 700, "output_length": 6, "hash_ids": [0, 2]},
    ),
    "sglang": lambda: lines(
        {"timestamp": "2026-11-01T10:00:00", "event": "request.received", "obj": {"input_ids": FIRST}},
        {"timestamp": "2026-11-01T10:00:01", "event": "request.finished", "obj": {"input_ids": FIRST}},
        {"timestamp": "2026-11-01T10:00:02", "event": "request.finished", "obj": {"input_ids": SECOND}},
    ),
    "sglang text": lambda: f"server started\n{TEXT_LOG}\n".encode(),
    "openai": lambda: lines(
        {"timestamp": 1.0, "user": "ann", "messages": [{"role": "system", "content": WORDS}]},
        {
            "timestamp": 2.0,
            "user": "bob",
            "messages": [{"role": "system", "content": WORDS}, {"role": "user", "content": "and now?"}],
        },
    ),
    "openai prompt": lambda: lines({"body": {"prompt": FIRST}}, {"body": {"prompt": SECOND}}),
    "lmcache": lambda: lines(
        {"timestamp": 1.0, "model_name": "m", "chunk_size": 16, "seq_len": 40, "chunk_hashes": ["0xa", "0xb"]},
        {"timestamp": 2.0, "model_name": "m", "chunk_size": 16, "seq_len": 48, "chunk_hashes": ["0xa", "0xb", "0xc"]},
    ),
    "tair": lambda: lines(
        *(
            {
                "type": kind,
                "instance_id": "i",
                "timestamp_ns": (1_793_600_000 + number) * 10**9,
                "keys": keys,
                "input_len": tokens,
            }
            for number, (keys, tokens) in enumerate((([1, 2], 40), ([1, 2, 3], 48)))
            for kind in ("get", "write")
        )
    ),
    "vllm_vcr": lambda: lines(
        {"meta": {"model": "m", "block_size": 16}},
        *(
            {
                "prompt_tokens": tokens,
                "cached_tokens": 0,
                "output_tokens": 2,
                "ttft_ms": 5.0,
                "itl_ms": [1.0],
                "arrival_ms": 100.0 * number,
                "block_hashes": hashes,
            }
            for number, (hashes, tokens) in enumerate((([1, 2**64 - 1], 40), ([1, 2**64 - 1, 3], 48)))
        ),
    ),
    "agentic_mooncake": lambda: lines(
        {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 16, "hash_id_scope": "local"},
        _agentic("r0", 40, [1, 2, 3], 1000),
        _agentic("r1", 48, [1, 2, 4], 2000, "r0"),
    ),
    "agent_sessions": lambda: lines(
        {
            "id": "s",
            "block_size": 16,
            "requests": [
                {"t": 0.0, "in": 40, "out": 8, "hash_ids": [1, 2, 3], "think_time": 0.0},
                {"t": 9.0, "in": 48, "out": 8, "hash_ids": [1, 2, 4], "think_time": 4.0},
            ],
        }
    ),
    "tracelab": lambda: table(
        ["session_id", "round_idx", "prefix_len", "input_len", "output_len", "tool_wait_after_ms"],
        ["s", 0, 0, 40, 8, 100],
        ["s", 1, 32, 16, 8, 0],
    ),
    "azure": lambda: (
        b"\xef\xbb\xbf"
        + table(
            ["TIMESTAMP", "ContextTokens", "GeneratedTokens"],
            ["2023-11-16 18:15:46.6805900", 40, 5],
            ["2023-11-16 18:15:50.9951690", 48, 6],
        )
    ),
    "burstgpt": lambda: table(
        ["Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type"],
        [5, "ChatGPT", 40, 5, 45, "Conversation log"],
        [45, "GPT-4", 48, 6, 54, "API log"],
    ),
    "vllm_bench": lambda: lines({"input_lens": [40, 48], "output_lens": [5, 6], "start_times": [1.0, 2.0]}),
    "vllm_bench requests": lambda: lines(
        {"request_id": "0", "input_toks": 40, "output_toks": 5, "arrival_time": 1.0},
        {"request_id": "1", "input_toks": 48, "output_toks": 6, "arrival_time": 2.0},
    ),
    "spanlab_records": lambda: lines(
        {"seed": 0, "rate_rps": 1.0, "prompt_tokens": 48, "output_tokens": 6, "reused_tokens": 0, "arrived_s": 2.0},
        {"seed": 0, "rate_rps": 1.0, "prompt_tokens": 40, "output_tokens": 5, "reused_tokens": 0, "arrived_s": 1.0},
        {"seed": 1, "rate_rps": 1.0, "prompt_tokens": 9, "output_tokens": 5, "reused_tokens": 0, "arrived_s": 1.0},
    ),
    "parquet": _parquet,
    "vllm_events": _events,
    "vllm_events maps": lambda: _maps(frames=False),
    "vllm_events frames": lambda: _maps(frames=True),
    "mooncake turns": lambda: lines(
        {"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
        {"session_id": "a", "delay": 500, "input_length": 700, "output_length": 6, "hash_ids": [2, 3]},
        {"session_id": "b", "timestamp": 3000, "input_length": 700, "output_length": 6, "hash_ids": [0, 2]},
    ),
    "openai proxy": lambda: lines(
        *(
            {
                "startTime": f"2026-11-01T10:00:0{index}Z",
                "completionStartTime": f"2026-11-01T10:00:0{index + 1}Z",
                "endTime": f"2026-11-01T10:00:0{index + 2}Z",
                "model": "m",
                "request": {"messages": [{"role": "user", "content": [{"type": "text", "text": WORDS}]}], "tools": []},
                "response": {"usage": {"prompt_tokens": 40, "completion_tokens": 5}},
            }
            for index in range(2)
        )
    ),
    "claude_code": lambda: lines(*claude_session()),
    "codex": lambda: lines(*codex_session()),
    "gemini_cli": lambda: lines(*gemini_session()),
    "otel": lambda: lines(*otel_lines()),
    "langfuse": lambda: lines(*langfuse_lines()),
    "litellm": lambda: lines(*litellm_lines()),
    "trajectory": lambda: lines(
        {
            "instance_id": "i1",
            "trajectory": [
                {"action": "ls", "execution_time": 2.5, "query": [{"role": "user", "content": WORDS}], "response": "x"},
                {
                    "action": "cat",
                    "execution_time": 1.0,
                    "query": [{"role": "user", "content": WORDS}, {"role": "assistant", "content": "x"}],
                    "response": "y",
                },
            ],
            "history": [],
            "info": {"model_stats": {"api_calls": 2}},
        }
    ),
    "sharegpt": lambda: lines(
        *(
            {"id": str(number), "conversations": [{"from": "human", "value": WORDS}, {"from": "gpt", "value": "yes"}]}
            for number in range(2)
        )
    ),
    "tracelab lines": lambda: lines(
        *(
            {
                "session_id": "s",
                "round_index": number,
                "input_tokens_total": (40, 48)[number],
                "prefix_tokens": (0, 32)[number],
                "newly_append_tokens": (40, 16)[number],
                "output_tokens": 8,
                "timing_events": [
                    {"event_type": "user_message", "timestamp": f"2026-11-01T10:00:0{number}Z"},
                    {"event_type": "text", "timestamp": f"2026-11-01T10:00:0{number}.5Z"},
                ],
            }
            for number in range(2)
        )
    ),
    "sagemaker": lambda: lines(
        *(
            {
                "captureData": {
                    "endpointInput": {"data": json.dumps({"prompt": tokens, "model": "m"}), "encoding": "JSON"},
                    "endpointOutput": {"data": "{}", "encoding": "JSON"},
                },
                "eventMetadata": {"eventId": str(number), "inferenceTime": f"2026-11-01T10:00:0{number}Z"},
            }
            for number, tokens in enumerate((FIRST, SECOND))
        )
    ),
    "guidellm": lambda: lines(
        {
            "benchmarks": [
                {
                    "requests": {
                        "successful": [
                            {"prompt_tokens": 40, "output_tokens": 5, "start_time": 1.0},
                            {"prompt_tokens": 48, "output_tokens": 6, "start_time": 2.0},
                        ]
                    }
                }
            ]
        }
    ),
    "aiperf": lambda: lines(
        *(
            {
                "metadata": {"request_start_ns": (1_793_600_000 + number) * 10**9},
                "metrics": {"input_sequence_length": {"value": tokens}, "output_sequence_length": {"value": 5}},
            }
            for number, tokens in enumerate((40, 48))
        )
    ),
    "openai_answers": lambda: lines(
        *(
            {
                "custom_id": str(number),
                "response": {
                    "status_code": 200,
                    "body": {
                        "object": "chat.completion",
                        "created": 1_793_600_000 + number,
                        "usage": {"prompt_tokens": tokens, "completion_tokens": 5},
                    },
                },
                "error": None,
            }
            for number, tokens in enumerate((40, 48))
        )
    ),
    "gemini": lambda: lines(*gemini_lines(plain=True)),
    "bedrock": lambda: lines(*converse_lines(plain=True)),
    "bedrock invocations": lambda: lines(*invocations(plain=True)),
    "helicone": lambda: lines(*helicone_lines()),
    "portkey": lambda: lines(*portkey_lines()),
    "openrouter": lambda: lines(*openrouter_lines()),
    "openai document": lambda: json.dumps([{"prompt": FIRST}, {"prompt": SECOND}], indent=1).encode(),
}


def write_sample(folder: Path, name: str) -> Path:
    """Write a log under a name that does not show its format."""
    path = folder / "server.log"
    path.write_bytes(SAMPLES[name]())
    return path

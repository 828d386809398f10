"""Damaged logs of every format are refused in one sentence, or read with values that can be.

SPANLAB_SEED=N tries other ones.
"""

import bz2
import gzip
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from spanlab.workloads.logs.log import Log
from spanlab.workloads.logs.read import LogSettings, read_log

from .log_samples import SAMPLES

SEED, INPUTS, LIMIT_S = int(os.environ.get("SPANLAB_SEED", "0")), 3000, 10
SAME, REFUSED, ANY = "same", "refused", "any"
TEXT, TABLES = ("sglang text",), ("tracelab", "azure", "burstgpt")
EVENTS = ("vllm_events", "vllm_events maps", "vllm_events frames")
WHOLE = ("parquet", "openai document")  # of which a part is no log
JSON = tuple(name for name in SAMPLES if name not in (*TEXT, *TABLES, *EVENTS, *WHOLE))

#: Values that no field of a kind may have.
NO_COUNT = (True, -1, 1.5, "x", [], {}, 1e300, 2**40, "-3", [1])
NO_TIME = (True, [], {}, "x", "nan", "2026-99-01", [1])
NO_WAIT = (True, -1, [], {}, "x", 1e300, -1e300, "2026-01-01")
NO_HASH = (True, 1.5, None, [], {}, 2**64, -(2**63) - 1)
NO_TOKEN = (*NO_HASH, -1, 2**31, "x")
NO_LABEL = (True, [], {}, [1])
#: Fields that a sample has, or may have, by the values that they may not have.
FIELDS: dict[str, tuple[Any, ...]] = (
    dict.fromkeys(("input_length", "output_length", "in", "out", "chunk_size", "block_size", "seq_len"), NO_COUNT)
    | dict.fromkeys(("input_toks", "output_toks", "prompt_tokens", "output_tokens", "seed"), NO_COUNT)
    | dict.fromkeys(("timestamp", "arrival_time", "arrived_s", "queued_ts"), NO_TIME)
    | dict.fromkeys(("think_time", "t", "rate_rps"), NO_WAIT)
    | dict.fromkeys(("session_id", "model", "lora_name", "cache_salt"), NO_LABEL)
)
LISTS = {"hash_ids": NO_HASH, "chunk_hashes": NO_HASH, "input_ids": NO_TOKEN, "prompt": NO_TOKEN}
LISTS |= {"input_lens": NO_COUNT, "output_lens": NO_COUNT}
#: Samples with a server's counts, which are used only if they are possible, by the field of a row that is always read.
USED_IF_POSSIBLE = {
    "openai proxy": "model",
    "claude_code": "timestamp",
    "codex": "timestamp",
    "gemini_cli": "timestamp",
    "litellm": "model",
    "openai_answers": "response",
    "gemini": "timestamp",
    "bedrock": "timestamp",
    "bedrock invocations": "timestamp",
    "helicone": "request_created_at",
    "portkey": "created_at",
    "openrouter": "created_at",
}
FOREIGN = (b"\0" * 40, b"\x80\x93\xff\xfe", b"one,two,three", b"{", b"[1]", b"null", b'"text"', b"7", b"[]", b"{" * 999)


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects in a JSON value, itself included."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects(inner)


def wrong_field(draw: random.Random, name: str, data: bytes) -> tuple[bytes, str]:
    """Give a known field of one row a value that it may not have."""
    rows = [json.loads(line) for line in data.splitlines()]
    row = draw.choice(rows)
    if name == "sglang":
        row = rows[draw.randrange(1, 3)]  # lines of other events are not read
    if name == "spanlab_records":
        row = rows[draw.randrange(2)]  # nor are all fields of other runs
    places = [(item, key) for item in objects(row) for key in item if key in FIELDS or key in LISTS]
    if name in USED_IF_POSSIBLE:
        places = [(row, USED_IF_POSSIBLE[name])]
    if not places:
        return data, SAME
    item, key = draw.choice(places)
    if key in LISTS and isinstance(item[key], list):
        values = draw.choice(LISTS[key])
        item[key] = list(item[key])
        item[key][draw.randrange(len(item[key]))] = values
    else:
        item[key] = draw.choice(FIELDS.get(key, (True, {})))
    return b"\n".join(json.dumps(row).encode() for row in rows), REFUSED


def odd_value(draw: random.Random, name: str, data: bytes) -> tuple[bytes, str]:
    """Replace, remove or add any value of a row."""
    rows = [json.loads(line) for line in data.splitlines()]
    item = draw.choice([item for row in rows for item in objects(row)])
    key = draw.choice([*item, *FIELDS, "delay", "event", "user", "usage", "error", "success", "first_token_ts"])
    odd = (None, True, 0, -1, 1e300, -1e300, 2**63, 1.5, "", "x", "\0", [], {}, [[]], [None], [{}], [1] * 99, "9" * 400)
    if draw.random() < 0.2:
        item.pop(key, None)
    else:
        item[key] = draw.choice(odd)
    return b"\n".join(json.dumps(row).encode() for row in rows), ANY


def wrong_cell(draw: random.Random, name: str, data: bytes) -> tuple[bytes, str]:
    rows = [line.split(",") for line in data.decode("utf-8-sig").splitlines()]
    row, header = draw.choice(rows[1:]), rows[0]
    column = draw.choice([index for index, title in enumerate(header) if title in TOKENS])
    row[column] = draw.choice(("x", "-1", "1.5", "", "true", "1e300", "99999999999", "NaN"))
    return "\n".join(map(",".join, rows)).encode(), REFUSED


TOKENS = (
    "ContextTokens",
    "GeneratedTokens",
    "Request tokens",
    "Response tokens",
    "prefix_len",
    "input_len",
    "output_len",
)


def values_of(container: list[Any] | dict[Any, Any]) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def odd_message(draw: random.Random, name: str, data: bytes) -> tuple[bytes, str]:
    """Replace any value in the batches of a capture."""
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(data)
    batches = list(unpacker)
    inner = draw.choice(batches)
    while draw.random() < 0.7 and (
        deeper := [value for value in values_of(inner) if isinstance(value, (list, dict)) and value]
    ):
        inner = draw.choice(deeper)
    odd = (
        None,
        True,
        -1,
        0,
        2**64 - 1,
        1e300,
        float("nan"),
        "x",
        b"\xff",
        [],
        {},
        [[]],
        {1: 2},
        [1] * 9,
        "BlockStored",
    )
    inner[draw.choice(list(inner)) if isinstance(inner, dict) else draw.randrange(len(inner))] = draw.choice(odd)
    return b"".join(map(msgpack.packb, batches)), ANY


def truncated(draw: random.Random, name: str, data: bytes) -> tuple[bytes, str]:
    size = draw.randrange(1, len(data))
    packed = data[:size]
    whole_lines = data[:size].endswith(b"\n") or data[size:].startswith((b"\n", b"\r\n"))
    certain = name in (*WHOLE, *JSON) and not whole_lines
    return packed, REFUSED if certain else ANY


def foreign_line(draw: random.Random, name: str, data: bytes) -> tuple[bytes, str]:
    rows = data.splitlines()
    rows.insert(draw.randrange(1, len(rows) + 1), draw.choice(FOREIGN))
    return b"\n".join(rows), REFUSED if name not in TEXT else ANY


def repeated_line(draw: random.Random, name: str, data: bytes) -> tuple[bytes, str]:
    rows = data.splitlines()
    return b"\n".join([*rows, *draw.choices(rows, k=3)]), ANY


def random_bytes(draw: random.Random, name: str, data: bytes) -> tuple[bytes, str]:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 3, 20))):
        position = draw.randrange(len(changed))
        length = draw.choice((0, 1, 1, 5))
        changed[position : position + length] = draw.randbytes(draw.choice((0, 1, 1, 5)))
    return bytes(changed), ANY


def huge_line(draw: random.Random, name: str, data: bytes) -> tuple[bytes, str]:
    return data.rstrip() + b"\n" + draw.choice((b"x", b" ", b"[", b"\0")) * (3 << 20), REFUSED


def packed(draw: random.Random, name: str, data: bytes) -> tuple[bytes, str]:
    if name == "parquet":  # which compresses its own columns
        return data, SAME
    return draw.choice((gzip.compress, bz2.compress))(data), SAME


def other_line_ends(draw: random.Random, name: str, data: bytes) -> tuple[bytes, str]:
    text = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\n", draw.choice((b"\r\n", b"\n\n")))
    return draw.choice((b"", b"\xef\xbb\xbf")) + text, SAME


ChangeFunction = Callable[[random.Random, str, bytes], tuple[bytes, str]]
ALWAYS: tuple[ChangeFunction, ...] = (truncated, random_bytes, packed)
LINES: tuple[ChangeFunction, ...] = (foreign_line, repeated_line, huge_line, other_line_ends)
CHANGES: dict[str, tuple[ChangeFunction, ...]] = (
    dict.fromkeys(JSON, (wrong_field, wrong_field, odd_value, odd_value, *ALWAYS, *LINES))
    | dict.fromkeys(TABLES, (wrong_cell, wrong_cell, *ALWAYS, *LINES))
    | dict.fromkeys(TEXT, (*ALWAYS, foreign_line, repeated_line, other_line_ends))
    | dict.fromkeys(WHOLE, ALWAYS)
    | dict.fromkeys(EVENTS[:2], (odd_message, odd_message, odd_message, *ALWAYS))
    | {EVENTS[2]: ALWAYS}
)


def check_log(log: Log) -> None:
    """Assert the properties of every log of any format."""
    assert log.requests > 0
    assert np.array_equal(log.starts, np.sort(log.starts))
    assert (log.starts[0], log.starts[-1]) == (0, len(log.pieces))
    assert log.lengths.min() >= 0
    assert log.prompt_tokens.max() <= LogSettings().prompt_tokens
    assert log.output_lens.min() >= 0
    assert log.arrived_ns[0] == 0
    assert np.diff(log.arrived_ns).min(initial=0) >= 0
    assert log.waits_ns is None or log.waits_ns.min() >= 0
    if log.observed is not None:
        times = np.stack(
            [log.observed.queued, log.observed.scheduled, log.observed.first_token, log.observed.last_token]
        )
        assert np.nanmax(np.abs(times - log.arrived_ns * 1e-9)) < 31 * 86_400


def on_alarm(*_: object) -> None:
    raise TimeoutError


@pytest.mark.slow
@pytest.mark.parametrize("bad_lines", ["refuse", "skip"])
def test_damaged_logs_are_refused_or_read_sensibly(tmp_path: Path, bad_lines: str):
    draw, path, counts = random.Random(SEED), tmp_path / "server.log", Counter[str]()
    settings = LogSettings(bad_lines=bad_lines, line_mib=2.0)
    plain = {}
    for name, data in SAMPLES.items():
        path.write_bytes(data())
        plain[name] = read_log(path, settings).fingerprint
    signal.signal(signal.SIGALRM, on_alarm)
    for number in range(INPUTS):
        name = draw.choice(list(SAMPLES))
        change = draw.choice(CHANGES[name])
        data, expected = change(draw, name, SAMPLES[name]())
        path.write_bytes(data)
        case = f"SPANLAB_SEED={SEED}, input {number}: {change.__name__} of {name}: {data[-600:]!r}"
        signal.alarm(LIMIT_S)
        try:
            log = read_log(path, settings)
        except ValueError as error:
            sentence = str(error)
            assert expected != SAME, f"{case}: {sentence}"
            assert str(path) in sentence, f"{case}: {sentence}"
            assert "\n" not in sentence, f"{case}: {sentence}"
            assert len(sentence) < 500 + len(str(path)), f"{case}: {sentence}"
            counts[REFUSED] += 1
        except Exception as error:
            raise AssertionError(case) from error
        else:
            try:
                check_log(log)
                assert expected == ANY or (expected == SAME and log.fingerprint == plain[name]) or bad_lines == "skip"
            except AssertionError as error:
                raise AssertionError(case) from error
            counts["read"] += 1
        finally:
            signal.alarm(0)
    assert min(counts.values()) > INPUTS // 10

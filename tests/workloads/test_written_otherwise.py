"""Every format of JSON lines, as other programs write the same lines: they read alike."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from spanlab.workloads.logs.log import Log
from spanlab.workloads.logs.read import LogSettings, read_log
from spanlab.workloads.logs.rows import Row, parse_json

from ..support.products import in_turn
from .log_samples import SAMPLES
from .test_bad_formats import LINES

Rows = list[dict[str, Any]]


def with_field(field: bytes) -> Callable[[Rows], bytes]:
    """Return a writer of lines that begin with a field that no format has."""
    return lambda rows: b"\n".join(b'{"zz_later": %b, %b' % (field, orjson.dumps(row)[1:]) for row in rows)


def docker_line(row: dict[str, Any]) -> dict[str, Any]:
    return {"log": orjson.dumps(row).decode() + "\n", "stream": "stdout"}


WRITERS: dict[str, Callable[[Rows], bytes]] = {
    "no numbers": with_field(b"[NaN, -Infinity]"),  # as Python's json writes them
    "half a character": with_field(rb'"cut \ud83d"'),  # as JavaScript cuts texts
    "one behind another": lambda rows: "\n".join(json.dumps(row, indent=2) for row in rows).encode(),  # as jq does
    "array": lambda rows: b"\xef\xbb\xbf" + orjson.dumps(rows),
    "line ends": lambda rows: b"\xef\xbb\xbf\r\n" + b"\r\n\r\n".join(map(orjson.dumps, rows)),
    "no end": lambda rows: b"\n".join(map(orjson.dumps, rows)),
    "docker": lambda rows: b"\n".join(orjson.dumps(docker_line(row)) for row in rows),
    "journal": lambda rows: b"\n".join(
        orjson.dumps({"MESSAGE": orjson.dumps(row).decode(), "__REALTIME_TIMESTAMP": "1", "_PID": "7"}) for row in rows
    ),
    "cloud": lambda rows: orjson.dumps([{"jsonPayload": row, "insertId": "a", "resource": {}} for row in rows]),
    "events": lambda rows: b"\n".join(
        orjson.dumps({"message": orjson.dumps(row).decode(), "ingestionTime": 7, "eventId": "a"}) for row in rows
    ),
    "times": lambda rows: b"\n".join(b"2026-11-02T09:00:00.123456789Z " + orjson.dumps(row) for row in rows),
    "kubernetes": lambda rows: b"\n".join(b"2026-11-02T09:00:00+01:00 stdout F " + orjson.dumps(row) for row in rows),
    "escapes": lambda rows: "\n".join(json.dumps(row, sort_keys=True) for row in rows).encode(),
}


def read(folder: Path, data: bytes, **settings: Any) -> Log:
    path = folder / "log.jsonl"
    path.write_bytes(data)
    return read_log(path, LogSettings(**settings))


def assert_alike(log: Log, usual: Log) -> None:
    assert (log.format, log.requests) == (usual.format, usual.requests)
    assert log.prompt_tokens.tolist() == usual.prompt_tokens.tolist()
    assert log.output_lens.tolist() == usual.output_lens.tolist()
    assert log.arrived_ns.tolist() == usual.arrived_ns.tolist()
    assert (log.usage is None) == (usual.usage is None)
    if log.usage is not None:
        assert np.array_equal(log.usage, usual.usage, equal_nan=True)


@pytest.mark.parametrize(("writer", "name"), in_turn(WRITERS, LINES))
def test_lines_of_other_writers_read_alike(tmp_path: Path, name: str, writer: str):
    rows = [orjson.loads(line) for line in SAMPLES[name]().splitlines()]
    assert_alike(read(tmp_path, WRITERS[writer](rows)), read(tmp_path, SAMPLES[name]()))


@pytest.mark.parametrize("name", LINES)
def test_first_line_that_is_cut_is_named_or_skipped(tmp_path: Path, name: str):
    data = SAMPLES[name]()
    cut = b'tity": {"a": 1}}\n' + data  # as the first line of a log that was rotated
    with pytest.raises(ValueError, match=r"log.jsonl:1: line: expected JSON"):
        read(tmp_path, cut)
    log = read(tmp_path, cut, bad_lines="skip")
    assert_alike(log, read(tmp_path, data))
    assert any("bad lines (line, first in line 1)" in note for note in log.notes)


#: Formats with lists of numbers, which are no texts.
_LISTS = ("sglang", "openai prompt", "vllm_vcr")


@pytest.mark.parametrize("name", [name for name in LINES if name not in _LISTS])
def test_numbers_as_texts_read_alike(tmp_path: Path, name: str):
    rows = [orjson.loads(line) for line in SAMPLES[name]().splitlines()]
    texts = [texts_of(row) for row in rows]
    log = read(tmp_path, b"\n".join(map(orjson.dumps, texts)))
    assert_alike(log, read(tmp_path, SAMPLES[name]()))


def texts_of(value: Any) -> Any:
    """Return a value with its numbers as texts, as exports of databases have them."""
    if isinstance(value, dict):
        return {key: texts_of(item) for key, item in value.items()}
    if isinstance(value, list):
        return [texts_of(item) for item in value]
    return str(value) if type(value) in (int, float) else value


def test_time_of_a_collector_is_that_of_a_line_without_one(tmp_path: Path):
    body = {"messages": [{"role": "user", "content": "a text"}]}
    rows = [docker_line(body) | {"time": f"2026-11-02T09:00:0{number}.5Z"} for number in (1, 4)]
    rows.append(docker_line(body | {"time": "2026-11-02T09:00:06.5Z"}) | {"time": "2026-11-02T10:00:00Z"})
    log = read(tmp_path, b"\n".join(map(orjson.dumps, rows)))
    assert log.arrived_ns.tolist() == [0, 3 * 10**9, 5 * 10**9]
    other = {"log": "server started\n", "stream": "stderr"}
    with pytest.raises(ValueError, match=r"log.jsonl:4: messages: expected a list of messages"):
        read(tmp_path, b"\n".join(map(orjson.dumps, [*rows, other])))


def test_damaged_value_behind_another_is_no_log(tmp_path: Path):
    rows = [orjson.loads(line) for line in SAMPLES["openai"]().splitlines()]
    with pytest.raises(ValueError, match="expected one complete JSON value"):
        read(tmp_path, WRITERS["one behind another"](rows)[:-9])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{"a": NaN}', {"a": None}),
        (b'{"a": "NaN", "b": -Infinity}', {"a": "NaN", "b": None}),
        (rb'["\ud83d", "\ude00", "\ud83d\ude00"]', ["?", "?", "\U0001f600"]),
        ('["\\ud83d"]', ["?"]),
    ],
)
def test_json_of_other_writers_is_parsed(text: bytes | str, value: Any):
    assert parse_json(text) == value


@pytest.mark.parametrize("text", [b'{"a": NaN', b"NaN, 1", b"{a: 1}", b"\xff"])
def test_text_that_is_no_json_is_no_value(text: bytes):
    with pytest.raises(orjson.JSONDecodeError):
        parse_json(text)


@pytest.mark.parametrize(
    "date",
    [
        "2026-11-02T09:00:00Z",
        "2026-11-02T10:00:00+01:00",
        "2026-11-02 09:00:00,000",
        "2026-11-02 09:00:00.000000 UTC",
        "2026-11-02 09:00:00+00",
        "2026-11-02T09:00:00.000000123Z",
        "2026/11/02 09:00:00",
        "20261102T090000Z",
        1_793_610_000,
        "1793610000",
        1_793_610_000_000,
        1_793_610_000_000_000,
        1_793_610_000_000_000_000,
    ],
)
def test_dates_of_every_writer_are_the_same_time(date: str | int):
    assert Row({"time": date}).seconds("time") == pytest.approx(1_793_610_000, abs=1e-6)

"""Recorded agent sessions: requests with ids of blocks, output lengths and think times; a session per object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson

from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Keys
from spanlab.workloads.logs.mooncake import block_keys, block_lengths
from spanlab.workloads.logs.pieces import named, salted
from spanlab.workloads.logs.source import BadFieldError, LogFile, LogFormat, Row, first_row, json_object

BLOCK = 64  # tokens, where a session does not say
TOGETHER = "sessions start together, at the first request of each: nobody recorded when each one started"
_OF_BLOCKS = ("in", "input_length", "input_tokens", "prompt_tokens")


@LOG_FORMATS.register("agent_sessions")
def agent_sessions() -> LogFormat:
    """A JSON file or JSONL; `t` is seconds since the session's start, else think times are added up."""
    return LogFormat(
        looks_for="JSON with a list requests of objects with hash_ids",
        recognises=lambda file: (
            isinstance(requests := first_or_whole(file).get("requests"), list)
            and bool(requests)
            and isinstance(requests[0], dict)
            and "hash_ids" in requests[0]
        ),
        read=_read,
        ids=None,
        block=lambda file: Row(first_or_whole(file)).count("block_size", least=1, default=BLOCK),
    )


def first_or_whole(file: LogFile) -> dict[str, Any]:
    """The first line as an object, or the whole file where an object has many lines."""
    row = first_row(file)
    if row or not file.head().lstrip().startswith(b"{"):
        return row
    return _parsed(file)


def _parsed(file: LogFile) -> dict[str, Any]:
    with file.open() as opened:
        return json_object(opened.read()) or {}


@dataclass
class _Session:
    row: Row
    name: str
    line: int


def _read(file: LogFile) -> Iterator[Entry]:
    """Requests of all sessions by time; sessions are small, so that each is held whole."""
    file.notes.append(TOGETHER)
    entries = [entry for session in _sessions(file) for entry in _session(session, file)]
    yield from sorted(entries, key=lambda entry: entry.at or 0.0)


def _sessions(file: LogFile) -> Iterator[_Session]:
    whole = _parsed(file) if not first_row(file) else {}
    if whole:
        yield _Session(Row(whole), str(whole.get("id", 0)), 1)
        return
    for number, line in file.lines():
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            file.refuse(number, "line: expected JSON")
            continue
        yield _Session(Row(row), str(row.get("id", number)), number)


def _session(session: _Session, file: LogFile) -> Iterator[Entry]:
    size, clock = session.row.count("block_size", least=1, default=BLOCK), 0.0
    for index, row in enumerate(_requests(session.row)):
        try:
            wait, at = _wait(row), row.seconds("t", "timestamp")
            clock += wait
            entry = _request(row, _keys(row, session), size, session, clock if at is None else at)
            yield replace(entry, wait=wait)
            clock += row.seconds("api_time", "duration") or 0.0
        except BadFieldError as error:
            file.refuse(session.line, f"requests[{index}].{error}")


def _requests(row: Row) -> Iterator[Row]:
    """Requests in order, those of a subagent where it was called."""
    for one in row.get("requests") or ():
        inner = Row(one)
        if isinstance(inner.get("requests"), list):
            yield from _requests(inner)
        else:
            yield inner


def _wait(row: Row) -> float:
    milliseconds = row.seconds("tool_wait_ms", scale=1e-3)
    return row.seconds("think_time") or milliseconds or 0.0


def _keys(row: Row, session: _Session) -> Keys:
    """Ids of blocks; those of a local scope mean something in their own session only."""
    local = session.row.get("hash_id_scope") == "local"
    return salted(block_keys(row), session.name if local else None)


def _request(row: Row, keys: Keys, size: int, session: _Session, at: float) -> Entry:
    """A request; a last block that is not full may have an id or none."""
    tokens = row.count(*_OF_BLOCKS, default=len(keys) * size)
    lengths = block_lengths(tokens, size)
    if len(keys) not in (len(lengths), tokens // size):
        raise BadFieldError("hash_ids", f"{len(lengths)} ids for {tokens} tokens, not {len(keys)}")
    if len(keys) < len(lengths):
        keys = np.append(keys, np.int64(named((session.name, session.line, at, len(keys)))))
    output = row.count("out", "output_length", "output_tokens", default=0)
    return Entry(keys, lengths, session.line, at, output, session.name)

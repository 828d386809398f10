"""Recorded agent sessions: one object per session, with block ids, output lengths and think times of its requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Keys
from spanlab.workloads.logs.mooncake import block_keys
from spanlab.workloads.logs.pieces import block_lengths, hash_name, salt_keys
from spanlab.workloads.logs.source import (
    BadFieldError,
    LogFile,
    LogFormat,
    Row,
    actual,
    first_row,
    identity_of,
    parse_object,
)

BLOCK = 64  # tokens, if a session has no block_size
TOGETHER = "sessions start together, at the first request of each: nobody recorded when each one started"
_OF_BLOCKS = ("in", "input_length", "input_tokens", "prompt_tokens")


@LOG_FORMATS.register("agent_sessions")
def agent_sessions() -> LogFormat:
    """A JSON file or JSONL; `t` is seconds since the session's start; without it, think times are summed."""
    return LogFormat(
        looks_for="JSON with a list requests of objects with hash_ids",
        recognises=lambda file: (
            isinstance(requests := first_row(file).get("requests"), list)
            and bool(requests)
            and isinstance(requests[0], dict)
            and "hash_ids" in requests[0]
        ),
        read=_read_entries,
        ids=None,
        fields=("requests",),
        block=lambda file: Row(first_row(file)).count("block_size", least=1, default=BLOCK),
    )


@dataclass
class _Session:
    row: Row
    name: str
    line: int


def _read_entries(file: LogFile) -> Iterator[Entry]:
    """Yield the requests of all sessions by time; all sessions are in memory, because they are small."""
    file.notes.append(TOGETHER)
    sessions = file.parsed(lambda item, number: _session(parse_object(item), number))
    entries = [entry for session in sessions for entry in _session_entries(session, file)]
    yield from sorted(entries, key=lambda entry: entry.at or 0.0)


def _session(row: Row, line: int) -> _Session:
    return _Session(row, str(row.fields.get("id", line)), line)


def _session_entries(session: _Session, file: LogFile) -> Iterator[Entry]:
    try:
        size, requests = session.row.count("block_size", least=1, default=BLOCK), list(_requests(session.row))
    except BadFieldError as error:
        file.refuse(session.line, str(error))
        return
    clock = 0.0
    for index, row in enumerate(requests):
        try:
            wait, time = _wait_s(row), row.duration("t")
            time = row.seconds("timestamp") if time is None else time
            clock += wait
            entry = _entry(row, _block_keys(row, session), size, session, clock if time is None else time)
            yield replace(entry, wait=wait)
            clock += row.duration("api_time", "duration") or 0.0
        except BadFieldError as error:
            file.refuse(session.line, f"requests[{index}].{error}")


def _requests(row: Row) -> Iterator[Row]:
    """Yield the requests in order; the requests of a subagent are at the position of its call."""
    requests = row.get("requests")
    if not isinstance(requests, list) or not all(isinstance(request, dict) for request in requests):
        raise BadFieldError("requests", f"a list of objects{actual(requests)}")
    for request in map(Row, requests):
        if isinstance(request.get("requests"), list):
            yield from _requests(request)
        else:
            yield request


def _wait_s(row: Row) -> float:
    milliseconds = row.duration("tool_wait_ms", scale=1e-3)
    return row.duration("think_time") or milliseconds or 0.0


def _block_keys(row: Row, session: _Session) -> Keys:
    """Return the block ids; ids of local scope are distinct for each session."""
    local = session.row.get("hash_id_scope") == "local"
    return salt_keys(block_keys(row), session.name) if local else block_keys(row)


def _entry(row: Row, keys: Keys, size: int, session: _Session, time: float) -> Entry:
    """Return a request; a partial last block may have an id or none."""
    tokens = row.count(*_OF_BLOCKS, default=len(keys) * size)
    blocks = -(-tokens // size)
    if len(keys) not in (blocks, tokens // size):
        raise BadFieldError("hash_ids", f"{blocks} ids for {tokens} tokens, not {len(keys)}")
    lengths = block_lengths(tokens, size)
    if len(keys) < len(lengths):
        keys = np.append(keys, np.int64(hash_name((session.name, session.line, time, len(keys)))))
    output = row.count("out", "output_length", "output_tokens", default=0)
    identity = identity_of(row) or identity_of(session.row)
    return Entry(keys, lengths, session.line, time, output, session.name, identity=identity)

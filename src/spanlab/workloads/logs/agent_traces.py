"""Traces of agents with the calls that each call waits for: agentic Mooncake, as Dynamo replays it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spanlab.workloads.logs.formats import block_keys, find_block_size
from spanlab.workloads.logs.log import Entry, block_lengths, salt_keys
from spanlab.workloads.logs.rows import BadFieldError, Row, actual, identity_of
from spanlab.workloads.logs.source import (
    LOG_FORMATS,
    LogFile,
    LogFormat,
    first_row,
    head_rows,
    header_count,
    parse_object,
)

SCHEMA = "dynamo.agentic_mooncake"
VERSION = 2
_FIRST_VERSION = ("wait_for", "branches", "prefix_reset", "tool_wait_ms", "tool_events")
COMPUTED = "rows without a timestamp arrive when those that they wait for have arrived, and their waits are over"
TRIGGERS = ("completion", "dispatch")


@LOG_FORMATS.register("agentic_mooncake")
def agentic_mooncake() -> LogFormat:
    """One call per line with its session and the calls that it waits for; the second version begins with a header."""
    return LogFormat(
        looks_for=f"JSONL with the schema {SCHEMA}, or with request_id, hash_ids and wait_for",
        recognises=_recognises,
        read=_read_entries,
        ids=None,
        block=_block_size,
        fields=("request_id", "session_id", "hash_ids"),
    )


def _recognises(file: LogFile) -> bool:
    if first_row(file).get("schema") == SCHEMA:
        return True
    rows = head_rows(file)
    is_named = bool(rows) and all("request_id" in row and "input_length" in row for row in rows)
    return is_named and any(name in row for row in rows for name in _FIRST_VERSION)


def _block_size(file: LogFile) -> int:
    header = Row(first_row(file))
    return header_count(file, header, "block_size") if "schema" in header.fields else find_block_size(file)


@dataclass
class _Calls:
    """Reader of the calls of a trace; `times` are the arrivals of those that were read, by name."""

    size: int
    is_local: bool = False
    times: dict[Hashable, float] = field(default_factory=dict)

    def entry(self, row: Row, line: int, file: LogFile) -> Entry | None:
        """Return the request of a line; None for the header."""
        if "schema" in row.fields:
            self._check_header(row)
            return None
        name = row.label("request_id")
        if name is None:
            raise BadFieldError("request_id", "a text, and it is missing")
        if name in self.times:
            raise BadFieldError("request_id", f"a name that no earlier line has{actual(name)}")
        tokens = file.check_length(row.count("input_length", "input_tokens"), "input_length")
        keys, lengths = block_keys(row), block_lengths(tokens, self.size)
        if len(keys) != len(lengths):
            raise BadFieldError("hash_ids", f"{len(lengths)} ids for {tokens} tokens, not {len(keys)}")
        after, wait = self._waits(row, file)
        at = row.seconds("timestamp", "created_time", scale=1e-3)
        if at is None:
            at = self._earliest(row, after, wait, file)
        self.times[name] = at
        play = row.label("play_id") if self.is_local else None
        return Entry(
            keys if play is None else salt_keys(keys, play),
            lengths,
            line,
            at,
            row.count("output_length", "output_tokens", default=0),
            row.label("session_id"),
            wait=wait,
            identity=identity_of(row),
            name=name,
            after=after,
        )

    def _check_header(self, row: Row) -> None:
        if row.get("schema") != SCHEMA:
            raise BadFieldError("schema", f"{SCHEMA}{actual(row.get('schema'))}")
        if row.count("version") != VERSION:
            raise BadFieldError("version", f"{VERSION}{actual(row.get('version'))}")
        self.is_local = row.get("hash_id_scope") == "local"

    def _waits(self, row: Row, file: LogFile) -> tuple[tuple[Hashable, ...], float]:
        """Return the calls that a call waits for, and the seconds from the end of the last of them."""
        listed = row.get("dependencies")
        if listed is None:
            named = row.get("wait_for")
            if named is None:
                named = []
            if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
                raise BadFieldError("wait_for", f"a list of texts{actual(named)}")
            wait = (row.duration("delay", "delay_ms", scale=1e-3) or 0.0) + (
                row.duration("tool_wait_ms", scale=1e-3) or 0.0
            )
            return tuple(named), wait
        if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
            raise BadFieldError("dependencies", f"a list of objects{actual(listed)}")
        after: list[Hashable] = []
        wait = 0.0
        for index, entry in enumerate(map(Row, listed)):
            name = entry.label("request_id")
            if name is None:
                raise BadFieldError(f"dependencies[{index}].request_id", "a text, and it is missing")
            trigger = entry.get("trigger")
            if trigger not in TRIGGERS:
                raise BadFieldError(f"dependencies[{index}].trigger", f"{' or '.join(TRIGGERS)}{actual(trigger)}")
            if trigger == "dispatch":
                file.set_aside("calls that wait for the start of others, which counts as a wait for their end")
            after.append(name)
            wait = max(wait, entry.duration("delay_ms", scale=1e-3) or 0.0)
        return tuple(after), wait

    def _earliest(self, row: Row, after: tuple[Hashable, ...], wait: float, file: LogFile) -> float:
        """Return the earliest arrival of a call without a timestamp."""
        least = row.duration("not_before_ms", scale=1e-3) or 0.0
        if after and COMPUTED not in file.notes:
            file.notes.append(COMPUTED)
        return max([least, *(self.times[name] + wait for name in after if name in self.times)])


def _read_entries(file: LogFile) -> Iterator[Entry]:
    """Yield the calls by time; they are in memory, since rows of different sessions follow each other."""
    try:
        size = _block_size(file)
    except BadFieldError as error:
        raise ValueError(f"log={file.path}: {error}") from error
    calls = _Calls(size)

    def parse(item: Any, line: int) -> Entry | None:
        return calls.entry(parse_object(item), line, file)

    entries = [*file.parsed(parse)]
    if entries and not np.isfinite([entry.at or 0.0 for entry in entries]).all():
        raise ValueError(f"log={file.path}: timestamp: expected finite times")
    yield from sorted(entries, key=lambda entry: entry.at or 0.0)

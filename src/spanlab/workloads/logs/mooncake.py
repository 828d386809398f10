"""Mooncake and timed-trace JSONL: prompts as block ids, with lengths and times.

The ids of Mooncake's traces identify a block and its whole prefix. Ids of other traces (Bailian) identify the block
alone. The ids show which is the case: a chained id never follows two different ids.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Keys
from spanlab.workloads.logs.pieces import block_lengths, hash_name
from spanlab.workloads.logs.source import (
    BadFieldError,
    LogFile,
    LogFormat,
    Row,
    first_row,
    head_rows,
    identity_of,
    parse_object,
)

BLOCKS = (512, 16, 32, 64, 128, 256, 1024)  # tokens; the size of Mooncake's traces first
INCREMENTS = (
    "later rows of a session are the new tokens of a turn, as AIPerf and Dynamo define rows with a delay: a prompt is "
    "all tokens and answers of its session before, and its row; workload.log.rows=whole takes each row as a prompt"
)
REPEATED = (
    "rows with a delay repeat the ids of the row before them: each is a whole prompt; workload.log.rows=increments "
    "takes them as the new tokens of a turn"
)
_TURN = {"input_length", "session_id"}
TOGETHER = "sessions without a timestamp start together: nobody recorded when each one started"


@LOG_FORMATS.register("mooncake")
def mooncake() -> LogFormat:
    """One request, or one turn, per line; `timestamp` in milliseconds, or in seconds with `chat_id` (Bailian)."""
    return LogFormat(
        looks_for="JSONL with hash_ids and input_length, or turns with input_length, session_id and delay",
        recognises=_recognises,
        read=_read_entries,
        ids=None,
        block=lambda file: None if INCREMENTS in file.notes else find_block_size(file),
        fields=("hash_ids", "input_length"),
    )


def _recognises(file: LogFile) -> bool:
    if {"hash_ids", "input_length"} <= first_row(file).keys():
        return True
    rows = [row.keys() for row in head_rows(file)]
    return all(row >= _TURN for row in rows) and any("delay" in row for row in rows)


def find_block_size(file: LogFile) -> int:
    """Return the tokens per block: `block_size` of the lines, or the size with one id per block in most prompts."""
    rows = [row for row in map(Row, head_rows(file)) if isinstance(row.get("hash_ids"), list)]
    declared = {size for row in rows if (size := _declared_size(row))}
    if len(declared) == 1:
        return declared.pop()
    fitting = {size: sum(_has_id_per_block(row, size) for row in rows) for size in BLOCKS}
    best = max(BLOCKS, key=lambda size: fitting[size])
    if (
        2 * fitting[best] > len(rows) or not rows
    ):  # turns without ids have no blocks; a line of another size raises its own error
        return best
    sizes = ", ".join(map(str, sorted(BLOCKS)))
    raise ValueError(f"log={file.path}: hash_ids: expected one id per block of {sizes} tokens, or a field block_size")


def _declared_size(row: Row) -> int:
    """Return the field block_size; 0 if it is missing or invalid, which the reader reports with its line."""
    try:
        return row.count("block_size", least=1, default=0)
    except BadFieldError:
        return 0


def _has_id_per_block(row: Row, size: int) -> bool:
    tokens = row.get("input_length")
    return isinstance(tokens, int) and -(-tokens // size) == len(row.get("hash_ids"))


def _read_entries(file: LogFile) -> Iterator[Entry]:
    """Yield requests; from the first increment on, they are held and sorted by time."""
    size, sessions = find_block_size(file), dict[Hashable, _Session]()
    has_delays = any("delay" in row for row in head_rows(file))
    later: list[Entry] = []

    def parse(row: Row, line: int) -> tuple[Entry, bool]:
        entry = _entry(row, line, size, file)
        is_session = file.rows != "whole" and row.get("session_id") is not None
        if not is_session:
            return entry, False
        before, has_delay = sessions.get(entry.session), row.get("delay") is not None
        if before is None:
            if entry.at is None and has_delays:
                file.notes.append(TOGETHER)
                entry = replace(entry, at=0.0)
            sessions[entry.session] = _Session(entry, entry.keys)
            return entry, False
        is_increment = file.rows == "increments" or (has_delay and entry.at is None)
        if is_increment and file.rows == "auto" and _repeats(before.own_keys, entry.keys):
            file.notes.append(REPEATED)
            is_increment = False
        elif is_increment:
            file.notes.append(INCREMENTS)
        sessions[entry.session] = after = _Session(before.followed_by(entry, is_increment), entry.keys)
        return after.entry, is_increment or entry.at is None

    for entry, is_later in file.parsed(lambda item, line: parse(parse_object(item), line)):
        if is_later or later:
            later.append(entry)
        else:
            yield entry
    yield from sorted(later, key=lambda entry: entry.at or 0.0)


def _entry(row: Row, line: int, size: int, file: LogFile) -> Entry:
    """Return the tokens of one row as a request."""
    row.count("block_size", least=1, default=size)
    tokens = file.check_length(row.count("input_length"), "input_length")
    if row.get("hash_ids") is None and row.get("session_id") is not None:  # a turn of new tokens alone
        keys, lengths = np.array([hash_name((line, "new"))], dtype=np.int64), np.array([tokens], dtype=np.int64)
    else:
        keys, lengths = block_keys(row), block_lengths(tokens, size)
    if len(keys) != len(lengths):
        raise BadFieldError("hash_ids", f"{len(lengths)} ids for {tokens} tokens, not {len(keys)}")
    scale = 1.0 if row.get("chat_id") is not None else 1e-3
    return Entry(
        keys,
        lengths,
        line,
        row.seconds("timestamp", scale=scale),
        row.count("output_length", default=0),
        row.label("session_id", "chat_id"),
        wait=row.duration("delay", scale=1e-3) or 0.0,
        identity=identity_of(row),
    )


@dataclass(frozen=True)
class _Session:
    """Last request of a session, and the ids of its own row."""

    entry: Entry
    own_keys: Keys

    def followed_by(self, entry: Entry, is_increment: bool) -> Entry:
        """Return the request of the next row; without a time, it arrives `delay` after the arrival before.

        The prompt of an increment is everything before it, with the answer to the last request, and its own tokens.
        """
        last = self.entry
        if entry.at is None and last.at is not None:
            entry = replace(entry, at=last.at + entry.wait)
        if not is_increment:
            return entry
        answer = [hash_name((last.session, last.line, "answer"))] if last.output_len else []
        keys = np.concatenate([last.keys, np.array(answer, dtype=np.int64), entry.keys])
        lengths = np.concatenate([last.lengths, [last.output_len] * len(answer), entry.lengths]).astype(np.int64)
        return replace(entry, keys=keys, lengths=lengths)


def _repeats(before: Keys, ids: Keys) -> bool:
    """Return whether a row has the ids of the row before, apart from its last, partial block."""
    full = max(len(before) - 1, 1)
    return bool(len(ids) >= len(before) > 0) and np.array_equal(before[:full], ids[:full])


def block_keys(row: Row, name: str = "hash_ids") -> np.ndarray:
    """Return block ids as numbers; hashes given as text become 64-bit numbers."""
    ids = row.get(name)
    if isinstance(ids, list) and ids and all(isinstance(text, str) for text in ids):
        return np.array([hash_name(text) for text in ids], dtype=np.int64)
    return row.ids(name)

"""Mooncake and timed-trace JSONL: prompts as block ids, with lengths and times.

The ids of Mooncake's traces identify a block and its whole prefix. Ids of other traces (Bailian) identify the block
alone. The ids show which is the case: a chained id never follows two different ids.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry
from spanlab.workloads.logs.pieces import block_lengths, hash_name
from spanlab.workloads.logs.source import BadFieldError, LogFile, LogFormat, Row, first_row, head_rows, json_lines

BLOCKS = (512, 16, 32, 64, 128, 256, 1024)  # tokens; the size of Mooncake's traces first


@LOG_FORMATS.register("mooncake")
def mooncake() -> LogFormat:
    """One request per line; `timestamp` in milliseconds, or in seconds if lines have `chat_id` (Bailian)."""
    return LogFormat(
        looks_for="JSONL with hash_ids and input_length",
        recognises=lambda file: {"hash_ids", "input_length"} <= first_row(file).keys(),
        read=_read_entries,
        ids=None,
        block=find_block_size,
    )


def find_block_size(file: LogFile) -> int:
    """Return the tokens per block: `block_size` of the lines, or the size with one id per block in most prompts."""
    rows = [row for row in map(Row, head_rows(file)) if isinstance(row.get("hash_ids"), list)]
    declared = {size for row in rows if (size := _declared_size(row))}
    if len(declared) == 1:
        return declared.pop()
    fitting = {size: sum(_has_id_per_block(row, size) for row in rows) for size in BLOCKS}
    best = max(BLOCKS, key=lambda size: fitting[size])
    if 2 * fitting[best] > len(rows):  # a line of another size raises its own error
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
    size = find_block_size(file)

    def parse(row: Row, line: int, file: LogFile) -> Entry:
        row.count("block_size", least=1, default=size)
        tokens = row.count("input_length")
        keys = block_keys(row)
        if len(keys) != -(-tokens // size):
            raise BadFieldError("hash_ids", f"{-(-tokens // size)} ids for {tokens} tokens, not {len(keys)}")
        scale = 1.0 if row.get("chat_id") is not None else 1e-3
        return Entry(
            keys,
            block_lengths(tokens, size),
            line,
            row.seconds("timestamp", scale=scale),
            row.count("output_length", default=0),
            row.label("session_id", "chat_id"),
        )

    return json_lines(parse)(file)


def block_keys(row: Row, name: str = "hash_ids") -> np.ndarray:
    """Return block ids as numbers; hashes given as text become 64-bit numbers."""
    ids = row.get(name)
    if isinstance(ids, list) and ids and all(isinstance(text, str) for text in ids):
        return np.array([hash_name(text) for text in ids], dtype=np.int64)
    return row.whole_numbers(name)

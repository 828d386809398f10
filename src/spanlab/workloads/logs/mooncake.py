"""Mooncake and timed-trace JSONL: prompts as ids of blocks, with lengths and times.

The ids of Mooncake's own traces name a block and all before it. Those of others (Bailian) name the block alone; which
it is, the ids tell: a chained id never stands behind two different ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry
from spanlab.workloads.logs.pieces import named
from spanlab.workloads.logs.source import BadFieldError, LogFile, LogFormat, Row, first_row, head_rows, json_lines

BLOCKS = (512, 16, 32, 64, 128, 256, 1024)  # tokens; Mooncake's own first


@LOG_FORMATS.register("mooncake")
def mooncake() -> LogFormat:
    """One request a line; `timestamp` in milliseconds, or in seconds where lines have `chat_id` (Bailian)."""
    return LogFormat(
        looks_for="JSONL with hash_ids and input_length",
        recognises=lambda file: {"hash_ids", "input_length"} <= first_row(file).keys(),
        read=_read,
        ids=None,
        block=block_of,
    )


def block_of(file: LogFile) -> int:
    """Tokens per block: as the lines say, or the size by which each prompt has one id a block."""
    rows = [row for row in map(Row, head_rows(file)) if isinstance(row.get("hash_ids"), list)]
    said = {row.count("block_size", least=1) for row in rows if row.get("block_size") is not None}
    if len(said) == 1:
        return said.pop()
    fitting = {size: sum(_fits(row, size) for row in rows) for size in BLOCKS}
    best = max(BLOCKS, key=lambda size: fitting[size])
    if 2 * fitting[best] > len(rows):  # a line that does not fit is refused by itself
        return best
    sizes = ", ".join(map(str, sorted(BLOCKS)))
    raise ValueError(f"log={file.path}: hash_ids: expected one id per block of {sizes} tokens, or a field block_size")


def _fits(row: Row, size: int) -> bool:
    tokens = row.get("input_length")
    return isinstance(tokens, int) and -(-tokens // size) == len(row.get("hash_ids"))


def _read(file: LogFile) -> Iterator[Entry]:
    size = block_of(file)

    def parse(row: Row, line: int, file: LogFile) -> Entry:
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
            row.get("session_id", "chat_id"),
        )

    return json_lines(parse)(file)


def block_keys(row: Row, name: str = "hash_ids") -> np.ndarray:
    """Ids of blocks as numbers; hashes that are spelled out become 64-bit numbers."""
    ids = row.get(name)
    if isinstance(ids, list) and ids and all(isinstance(one, str) for one in ids):
        return np.array([named(one) for one in ids], dtype=np.int64)
    return row.whole_numbers(name)


def block_lengths(tokens: int, size: int) -> np.ndarray:
    """Tokens of each block of a prompt, the last one shorter."""
    lengths = np.full(-(-tokens // size), size, dtype=np.int64)
    if tokens % size:
        lengths[-1] = tokens % size
    return lengths

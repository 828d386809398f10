"""LMCache's lookup log: the chunk hashes of each request; a hash covers its chunk and the whole prefix."""

from __future__ import annotations

import numpy as np

from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Ids
from spanlab.workloads.logs.mooncake import block_keys
from spanlab.workloads.logs.pieces import hash_name
from spanlab.workloads.logs.source import BadFieldError, LogFile, LogFormat, Row, first_row, identity_of, json_lines

CHUNK = 256  # tokens, the default of LMCache
TAIL = "only full chunks are looked up: the end of a prompt behind them counts as new, as LMCache counts it"


@LOG_FORMATS.register("lmcache")
def lmcache() -> LogFormat:
    """One lookup per line; different models and salts share nothing."""
    return LogFormat(
        looks_for="JSONL with chunk_hashes",
        recognises=lambda file: "chunk_hashes" in first_row(file),
        read=json_lines(_parse_row),
        ids=Ids.CHAINED,
        block=lambda file: Row(first_row(file)).count("chunk_size", least=1, default=CHUNK),
        fields=("chunk_hashes",),
    )


def _parse_row(row: Row, line: int, file: LogFile) -> Entry:
    keys, size = block_keys(row, "chunk_hashes"), row.count("chunk_size", least=1, default=CHUNK)
    if row.get("chunk_size") is None:
        file.notes.append(f"the log names no chunk_size: chunks of {CHUNK} tokens, LMCache's default, are assumed")
    tokens = row.count("seq_len", "num_tokens", default=len(keys) * size)
    if not len(keys) * size <= tokens < (len(keys) + 1) * size:
        raise BadFieldError("seq_len", f"{len(keys) * size} to {(len(keys) + 1) * size - 1} for {len(keys)} chunks")
    file.notes.append(TAIL)
    lengths = keys * 0 + size
    if tail := tokens - len(keys) * size:
        keys, lengths = np.append(keys, hash_name(("tail", line))), np.append(lengths, tail)
    return Entry(
        keys,
        lengths,
        line,
        row.seconds("timestamp", "time", "ts"),
        tenant=row.label("tenant", "salt"),
        identity=identity_of(row),
    )

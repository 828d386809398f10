"""Traces of prompts as hashes of their blocks: Tair KVCache and vllm-vcr."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from spanlab.workloads.logs.formats import block_keys
from spanlab.workloads.logs.log import Entry, Identity, Ids, Ints, Keys, block_lengths, hash_name
from spanlab.workloads.logs.observed import UNKNOWN, Moments, Usage
from spanlab.workloads.logs.rows import BadFieldError, Row, actual, first_count, identity_of
from spanlab.workloads.logs.source import (
    LOG_FORMATS,
    LogFile,
    LogFormat,
    head_rows,
    header_count,
    json_lines,
    parse_object,
)
from spanlab.workloads.logs.spans import WITHHELD

#: Tokens per block that are tried where a trace does not name them.
SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def _fitting_size(file: LogFile, tokens: tuple[str, ...], keys: str) -> int | None:
    """Return the tokens per block with one key per full block in most prompts; None if no size fits
    most of them."""
    prompts: list[tuple[int, int]] = []
    for row in map(Row, head_rows(file)):
        length, ids = first_count(row.fields, *tokens), row.get(keys)
        if isinstance(ids, list) and ids and length > 0:
            prompts.append((int(length), len(ids)))
    if not prompts:
        return None
    fitting = {size: sum(length // size == count for length, count in prompts) for size in SIZES}
    best = max(SIZES, key=lambda size: fitting[size])
    return best if 2 * fitting[best] > len(prompts) else None


def _pieces(keys: Keys, tokens: int, size: int, line: int) -> tuple[Keys, Ints]:
    """Return the full blocks of a prompt, and the tokens behind them, which no other prompt has."""
    lengths = block_lengths(len(keys) * size, size)
    if tail := tokens - len(keys) * size:
        keys, lengths = np.append(keys, hash_name(("tail", line))), np.append(lengths, tail)
    return keys, lengths


# ------------------------------------------------------------------------------
# Tair KVCache: the events of its manager, and the traces of its optimizer. A trace names the
# keys of full blocks, and the tokens of a block stand in a file of settings.
# ------------------------------------------------------------------------------

_GETS = ("get", "request", "GetCacheLocation")
_WRITES = ("write", "StartWriteCache", "FinishWriteCache")
_TAIR_LENGTHS = ("input_len", "input_token_len")
_TAIR_TIMES = (("timestamp_ns", 1e-9), ("timestamp_us", 1e-6), ("trigger_time_us", 1e-6))
_PLAIN_SIZE = 16  # tokens of a block where no length of a prompt tells them
TAIR_TAIL = "only full blocks have keys: the tokens behind them count as new"
NO_SIZE = (
    f"the trace tells no tokens per block: each block counts as {_PLAIN_SIZE}, so that numbers of blocks are exact and "
    "lengths are not"
)
NO_LENGTH = "some events tell no length of their prompt: their full blocks are all of it"
STORED = "every prompt counts as stored, whatever writes the trace has"


@LOG_FORMATS.register("tair")
def tair() -> LogFormat:
    """One event per line; one request per query of the keys of its blocks."""
    return LogFormat(
        looks_for="JSONL with type, keys and timestamp_ns or trigger_time_us: get, request or GetCacheLocation",
        recognises=lambda file: any(map(_is_tair, head_rows(file))),
        read=_tair_read_entries,
        ids=None,
        block=_tair_size,
        fields=("type", "keys", "timestamp_ns"),
    )


def _is_tair(row: dict[str, Any]) -> bool:
    is_event = row.get("type") in (*_GETS, *_WRITES) and bool(
        {"instance_id", "source"} & row.keys()
    )
    return is_event and bool({"timestamp_ns", "timestamp_us", "trigger_time_us"} & row.keys())


def _has_lengths(file: LogFile) -> bool:
    return any(
        row.get(*_TAIR_LENGTHS) for row in map(Row, head_rows(file)) if row.get("type") in _GETS
    )


def _tair_size(file: LogFile) -> int:
    """Return the tokens per block: those that fit the lengths of most prompts."""
    if not _has_lengths(file):
        return _PLAIN_SIZE
    size = _fitting_size(file, _TAIR_LENGTHS, "keys")
    if size is None:
        sizes = ", ".join(map(str, SIZES))
        raise BadFieldError("keys", f"one key per full block of {sizes} tokens of input_len")
    return size


def _tair_read_entries(file: LogFile) -> Iterator[Entry]:
    try:
        size, has_lengths = _tair_size(file), _has_lengths(file)
    except BadFieldError as error:
        raise ValueError(f"log={file.path}: {error}") from error
    file.notes.append(STORED)
    file.notes.append(TAIR_TAIL if has_lengths else NO_SIZE)

    def parse(row: Row, line: int, file: LogFile) -> Entry | None:
        kind = row.get("type")
        if not isinstance(kind, str):
            raise BadFieldError(
                "type", f"get, request, write or the name of an event{actual(kind)}"
            )
        if kind not in _GETS:
            file.set_aside(
                "events of writes" if kind in _WRITES else f"lines of the type {kind:.40}"
            )
            return None
        keys = block_keys(row, "keys")
        tokens = _tair_tokens(row, kind, len(keys), size, file) if has_lengths else len(keys) * size
        # a list of marks, or the number of the first blocks
        mask = row.get("block_mask")
        if not isinstance(mask, list):
            marked = min(row.count("block_mask", default=0), len(keys))
        elif all(isinstance(mark, bool) for mark in mask):
            marked = sum(mask)
        else:
            raise BadFieldError(
                "block_mask", f"a list of true and false, or a whole number{actual(mask)}"
            )
        if marked:
            file.set_aside(
                "blocks as queries, since the engine had found them itself (block_mask)", marked
            )
        instance = row.label("instance_id", "source")
        times = (
            row.seconds(name, scale=scale)
            for name, scale in _TAIR_TIMES
            if row.get(name) is not None
        )
        return Entry(
            *_pieces(keys, tokens, size, line),
            line,
            next(times, None),
            tenant=instance,
            identity=() if instance is None else (("instance", instance),),
        )

    yield from json_lines(parse)(file)


def _tair_tokens(row: Row, kind: str, keys: int, size: int, file: LogFile) -> int:
    """Return the length of a prompt; an event of the manager may not tell it, and then its blocks
    are all of it."""
    name = next((name for name in _TAIR_LENGTHS if row.get(name) is not None), _TAIR_LENGTHS[0])
    if kind == "GetCacheLocation" and not row.get(name):
        if NO_LENGTH not in file.notes:
            file.notes.append(NO_LENGTH)
        return keys * size
    tokens = file.check_length(row.count(name, least=1), name)
    if keys > tokens // size:
        raise BadFieldError(
            "keys", f"at most {tokens // size} for {tokens} tokens in blocks of {size}, not {keys}"
        )
    return tokens


# ------------------------------------------------------------------------------
# vllm-vcr: a capture of an engine, one record per request in the order in which they finished.
# ------------------------------------------------------------------------------

_BYTES_OF_HASH = 8
VCR_TAIL = "only full blocks have hashes: the tokens behind them count as new"


@LOG_FORMATS.register("vllm_vcr")
def vllm_vcr() -> LogFormat:
    """One finished request per line, behind a line with the settings of the capture."""
    return LogFormat(
        looks_for="JSONL with prompt_tokens, output_tokens and ttft_ms, behind a line with meta",
        recognises=lambda file: any(
            {"prompt_tokens", "output_tokens", "ttft_ms"} <= row.keys() for row in head_rows(file)
        ),
        read=_vcr_read_entries,
        ids=Ids.CHAINED,
        block=_vcr_size,
        fields=("prompt_tokens", "output_tokens", "ttft_ms"),
    )


def _vcr_size(file: LogFile) -> int | None:
    """Return the tokens per block: those of the first line, or those that fit most prompts; None
    without hashes."""
    rows = [*map(Row, head_rows(file))]
    for row in rows:
        if row.get("meta.block_size") is not None:
            return header_count(file, row, "meta.block_size")
    return _fitting_size(file, ("prompt_tokens",), "block_hashes")


def _vcr_read_entries(file: LogFile) -> Iterator[Entry]:
    """Yield requests by their arrival, or in the order of the file if some have none."""
    try:
        records = _Records(_vcr_size(file))
    except BadFieldError as error:
        raise ValueError(f"log={file.path}: {error}") from error
    entries = [
        *file.parsed(lambda item, line: records.entry(parse_object(item), line, file), counts=False)
    ]
    if all(entry.at is not None for entry in entries):
        entries.sort(key=lambda entry: entry.at or 0.0)
    yield from entries


@dataclass
class _Records:
    """Reader of the records of a capture, whose hashes are of blocks of `size` tokens; None:
    nothing tells it."""

    size: int | None
    _has_records: bool = False
    _model: Identity = ()

    def entry(self, row: Row, line: int, file: LogFile) -> Entry | None:
        """Return the request of a line; None for the settings."""
        if "meta" in row.fields and "prompt_tokens" not in row.fields:
            if self._has_records:
                raise BadFieldError("meta", "the first line: every capture has a clock of its own")
            model = row.label("meta.model")
            self._model = () if model is None else (("model", model),)
            return None
        self._has_records = True
        tokens = file.check_length(row.count("prompt_tokens"), "prompt_tokens")
        output, cached = row.count("output_tokens"), row.count("cached_tokens", default=0)
        if cached > tokens:
            raise BadFieldError("cached_tokens", f"at most prompt_tokens, {tokens}, not {cached}")
        at = row.seconds("arrival_ms", scale=1e-3)
        moments = _vcr_moments(row, at)
        keys, lengths = self._content(row, tokens, line, file)
        identity, usage = self._model + identity_of(row), Usage(tokens, cached)
        return Entry(
            keys, lengths, line, at, output, moments=moments, usage=usage, identity=identity
        )

    def _content(self, row: Row, tokens: int, line: int, file: LogFile) -> tuple[Keys, Ints]:
        """Return the blocks of a prompt; a prompt without hashes is known by its length, or is
        shorter than a block."""
        if row.get("block_hashes") is None:
            file.unread.take(_BYTES_OF_HASH)
            if self.size is None or tokens >= self.size:
                file.unread.leave(WITHHELD, 0)
                file.unread.withhold()
            else:
                file.unread.finish()
            return _pieces(np.zeros(0, dtype=np.int64), tokens, 1, line)
        keys = block_keys(row, "block_hashes")
        if self.size is None:
            raise BadFieldError(
                "block_hashes", "tokens per block in meta.block_size, and they are missing"
            )
        if len(keys) != tokens // self.size:
            full = tokens // self.size
            raise BadFieldError(
                "block_hashes",
                f"{full} for {tokens} tokens in blocks of {self.size}, not {len(keys)}",
            )
        file.unread.take(_BYTES_OF_HASH * (len(keys) + 1))
        file.unread.finish()
        if VCR_TAIL not in file.notes:
            file.notes.append(VCR_TAIL)
        return _pieces(keys, tokens, self.size, line)


def _vcr_moments(row: Row, at: float | None) -> Moments:
    """Return the times of first and last token, from the gaps between tokens or from their mean."""
    wait = row.duration("ttft_ms", scale=1e-3)
    if at is None or wait is None:
        return UNKNOWN
    last = np.nan
    if row.get("itl_ms") is not None:
        gaps = row.numbers("itl_ms")
        if min(gaps, default=0.0) < 0:
            raise BadFieldError("itl_ms", f"numbers from 0 up{actual(min(gaps))}")
        last = at + wait + 1e-3 * sum(gaps)
    elif row.get("itl_summary.mean_ms") is not None:
        mean = row.duration("itl_summary.mean_ms", scale=1e-3) or 0.0
        last = at + wait + mean * row.count("itl_summary.count")
    elif row.count("output_tokens") == 1:
        last = at + wait
    return Moments(first_token=at + wait, last_token=last)

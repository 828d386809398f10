"""Reader of logs: detect the format, and read the requests in order of time, with notes."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from spanlab.checks import one_of, positive
from spanlab.core.request import Tokens
from spanlab.workloads.logs.formats import LOG_FORMATS, detect_format, existing_path
from spanlab.workloads.logs.log import Columns, Entry, Log
from spanlab.workloads.logs.source import BadFieldError, LogFile, LogFormat
from spanlab.workloads.tokenizer import find_tokenizer

BYTES_PER_TOKEN = 4  # of text without a tokenizer: close to the ratio of large vocabularies for English
STAND_IN = (
    f"no tokenizer is given: {BYTES_PER_TOKEN} bytes of text count as one token, so that lengths are estimates; "
    "workload.tokenizer=FILE counts real ones"
)


def format_names() -> tuple[str, ...]:
    """Return the valid values of `format`."""
    return ("auto", *LOG_FORMATS)


@dataclass
class LogSettings:
    """Options for reading a log.

    `format`     the log's format; auto: recognised by its content
    `piece`      tokens per piece, the unit in which token ids or text are compared; 1 finds every shared token and
                 takes 16 times the memory of the default
    `requests`   the first requests of the log; null: all
    `bad_lines`  refuse the log, or skip the line and add a note
    `backwards`  if time goes backwards: refuse the log, or sort its requests
    """

    format: str = "auto"
    piece: int = 16
    requests: int | None = None
    bad_lines: str = "refuse"
    backwards: str = "refuse"

    def __post_init__(self) -> None:
        one_of("workload.log.format", self.format, format_names())
        positive("workload.log.piece", self.piece)
        positive("workload.log.requests", self.requests)
        one_of("workload.log.bad_lines", self.bad_lines, ("refuse", "skip"))
        one_of("workload.log.backwards", self.backwards, ("refuse", "sort"))


def read_log(path: Path, settings: LogSettings, tokenizer: str | None = None) -> Log:
    """Read the log at `path`; ValueError names line and field of an entry that does not match the format."""
    try:
        log = _read_path(path, settings, tokenizer)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"log={path}: expected a complete gzip file, but it is damaged: {error}") from error
    if not log.lengths.any():
        raise ValueError(f"log={path}: expected prompts with tokens, but all {log.requests:,} requests are empty")
    return log


def _read_path(path: Path, settings: LogSettings, tokenizer: str | None) -> Log:
    notes: list[str] = []
    encode = _encoder(tokenizer, notes)
    file = LogFile(existing_path(path), settings.piece, encode, settings.bad_lines == "skip", notes)
    if path.is_file() and not file.head().strip():
        raise ValueError(f"log={path}: the file is empty; expected requests")
    name, log_format = _format(file, settings.format)
    columns = _columns(file, log_format, settings)
    if not len(columns):
        raise ValueError(f"log={path}: the file has no requests; expected {log_format.looks_for}")
    try:
        block = log_format.block(file)
    except BadFieldError as error:
        raise ValueError(f"log={path}: {error}") from error
    all_notes = (*dict.fromkeys(notes), *file.unread.notes())
    return replace(columns.log(name, log_format.ids, block, all_notes, f"log={path}"), unread=file.unread)


def _format(file: LogFile, name: str) -> tuple[str, LogFormat]:
    return detect_format(file) if name == "auto" else (name, LOG_FORMATS.make(name, {}, {}))


def _columns(file: LogFile, log_format: LogFormat, settings: LogSettings) -> Columns:
    """Read the requests in order of time; only a log that needs sorting is held as entries."""
    columns, order = Columns(), _TimeOrder(file, settings.backwards == "sort")
    for entry in log_format.read(file):
        if len(columns) + len(order.late_entries) == settings.requests:
            break
        if order.in_order(entry):
            columns.add(entry)
    return columns if not order.late_entries else _sorted(log_format, file, settings)


def _sorted(log_format: LogFormat, file: LogFile, settings: LogSettings) -> Columns:
    """Read the log again and sort all requests by time; only the first reading shows that this is necessary."""
    file.unread.clear()
    columns, entries = Columns(), list(islice(log_format.read(file), settings.requests))
    file.notes.append("time goes backwards in the log: its requests are sorted by time")
    for entry in sorted(entries, key=lambda entry: entry.at or 0.0):
        columns.add(entry)
    return columns


class _TimeOrder:
    """Check of time order: the latest time so far, and the entries with an earlier time."""

    def __init__(self, file: LogFile, sorts: bool) -> None:
        self.file, self.sorts, self.at, self.line, self.late_entries = file, sorts, -np.inf, 0, list[Entry]()

    def in_order(self, entry: Entry) -> bool:
        if entry.at is None or entry.at >= self.at:
            self.at, self.line = (self.at if entry.at is None else entry.at), entry.line
            return True
        if not self.sorts:
            raise ValueError(
                f"{self.file.path}:{entry.line}: timestamp: expected a time no earlier than that of line {self.line}; "
                "workload.log.backwards=sort sorts the requests"
            )
        self.late_entries.append(entry)
        return False


def _encoder(tokenizer: str | None, notes: list[str]) -> Callable[[str], Tokens]:
    if tokenizer is None:

        def count_bytes(text: str) -> Tokens:
            if STAND_IN not in notes:
                notes.insert(0, STAND_IN)
            return bytes_as_tokens(text)

        return count_bytes
    backend = find_tokenizer(tokenizer).tokenizer
    return lambda text: np.array(backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)


def bytes_as_tokens(text: str) -> Tokens:
    """Return runs of four bytes of a text as token ids, int32; the last run is padded."""
    data = text.encode()
    padded = data + bytes(-len(data) % BYTES_PER_TOKEN)
    return np.frombuffer(padded, dtype=np.int32)

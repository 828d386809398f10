"""Reading a log: its format, its requests in order of time, and what must be said of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spanlab.checks import one_of, positive
from spanlab.core.request import Tokens
from spanlab.workloads.logs.formats import LOG_FORMATS, existing, recognised
from spanlab.workloads.logs.log import Columns, Entry, Log
from spanlab.workloads.logs.source import LogFile, LogFormat
from spanlab.workloads.tokenizer import find_tokenizer

BYTES_PER_TOKEN = 4  # of text, where no tokenizer is given: close to what large vocabularies need for English
STAND_IN = (
    f"no tokenizer is given: {BYTES_PER_TOKEN} bytes of text count as one token, so that lengths are estimates; "
    "workload.tokenizer=FILE counts real ones"
)


def format_names() -> tuple[str, ...]:
    """What `format` may be."""
    return ("auto", *LOG_FORMATS)


@dataclass
class LogSettings:
    """How a log is read.

    `format`     the log's format; auto: recognised by its content
    `piece`      tokens per piece in which logs of token ids or text are compared; 1 finds every shared token, and takes
                 that many times the memory
    `requests`   the first requests of the log; null: all
    `bad_lines`  refuse the log, or skip the line and say so
    `backwards`  where time goes backwards: refuse the log, or sort its requests
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
    """The log at `path`; ValueError with the line and the field for one that is not as its format says."""
    try:
        log = _read(path, settings, tokenizer)
    except (EOFError, zlib.error) as error:
        raise ValueError(f"log={path}: expected a whole file packed with gzip, it is damaged: {error}") from error
    if not log.lengths.any():
        raise ValueError(f"log={path}: expected prompts with tokens, all {log.requests:,} requests have none")
    return log


def _read(path: Path, settings: LogSettings, tokenizer: str | None) -> Log:
    notes: list[str] = []
    encode = _encoder(tokenizer, notes)
    file = LogFile(existing(path), settings.piece, encode, settings.bad_lines == "skip", notes)
    if path.is_file() and not file.head().strip():
        raise ValueError(f"log={path}: the file is empty; expected requests")
    name, made = _format(file, settings.format)
    columns = _columns(file, made, settings)
    if not len(columns):
        raise ValueError(f"log={path}: no request in it; expected {made.looks_for}")
    return columns.log(name, made.ids, made.block(file), tuple(dict.fromkeys(notes)))


def _format(file: LogFile, name: str) -> tuple[str, LogFormat]:
    return recognised(file) if name == "auto" else (name, LOG_FORMATS.make(name, {}, {}))


def _columns(file: LogFile, made: LogFormat, settings: LogSettings) -> Columns:
    """The requests in order of time; only a log that must be sorted is held as entries."""
    columns, latest = Columns(), _Latest(file, settings.backwards == "sort")
    for entry in made.read(file):
        if len(columns) + len(latest.later) == settings.requests:
            break
        if latest.in_order(entry):
            columns.add(entry)
    return columns if not latest.later else _sorted(made, file, settings)


def _sorted(made: LogFormat, file: LogFile, settings: LogSettings) -> Columns:
    """All requests sorted by time; a second reading, for only now is it known that they must be."""
    columns, entries = Columns(), []
    for number, entry in enumerate(made.read(file)):
        if number == settings.requests:
            break
        entries.append(entry)
    file.notes.append("time goes backwards in the log: its requests are sorted by time")
    for entry in sorted(entries, key=lambda entry: entry.at or 0.0):
        columns.add(entry)
    return columns


class _Latest:
    """The latest time so far, and the entries that are earlier than one before them."""

    def __init__(self, file: LogFile, sorts: bool) -> None:
        self.file, self.sorts, self.at, self.line, self.later = file, sorts, -np.inf, 0, list[Entry]()

    def in_order(self, entry: Entry) -> bool:
        if entry.at is None or entry.at >= self.at:
            self.at, self.line = (self.at if entry.at is None else entry.at), entry.line
            return True
        if not self.sorts:
            raise ValueError(
                f"{self.file.path}:{entry.line}: timestamp: expected no earlier than that of line {self.line}; "
                "workload.log.backwards=sort sorts the requests"
            )
        self.later.append(entry)
        return False


def _encoder(tokenizer: str | None, notes: list[str]) -> Callable[[str], Tokens]:
    if tokenizer is None:

        def count_bytes(text: str) -> Tokens:
            if STAND_IN not in notes:
                notes.insert(0, STAND_IN)
            return bytes_as_tokens(text)

        return count_bytes
    found = find_tokenizer(tokenizer).tokenizer
    return lambda text: np.array(found.encode(text, add_special_tokens=False).ids, dtype=np.int32)


def bytes_as_tokens(text: str) -> Tokens:
    """Text in runs of four bytes, int32; the last one is padded."""
    data = text.encode()
    padded = data + bytes(-len(data) % BYTES_PER_TOKEN)
    return np.frombuffer(padded, dtype=np.int32)

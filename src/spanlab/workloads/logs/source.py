"""Reading a log: opening the file, its lines and fields, and the registry of formats."""

from __future__ import annotations

import csv
import heapq
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import numpy as np
import orjson

from spanlab.core.token_string import Tokens
from spanlab.registry import Registry
from spanlab.workloads.files import Content, open_unpacked
from spanlab.workloads.logs.log import Entry, Ids
from spanlab.workloads.logs.observed import Counters, Unread
from spanlab.workloads.logs.rates import rates_of
from spanlab.workloads.logs.rows import BadFieldError, Row, actual, parse_json
from spanlab.workloads.logs.wrappers import unwrapped, without_prefix

# ------------------------------------------------------------------------------
# Input of log formats: files and folders, numbered lines, and what is refused, set aside or
# remarked.
# ------------------------------------------------------------------------------

T = TypeVar("T")
Timed = TypeVar("Timed", bound="_HasTime")
FOLDER = "the log is a folder: its requests are numbered by time, and not by line"


class _HasTime(Protocol):
    at: float | None


_BOM = b"\xef\xbb\xbf"
_HEAD = 1 << 16  # bytes by which a format is recognised
_PACKED = ("", ".gz", ".bz2", ".xz", ".zst")  # endings of compressed files in a folder
_TRIED_FILES = 20  # of a folder, to recognise its format
_NAMED_FILES = 5  # in the note about bad lines of a folder
_ARRAY = re.compile(rb"\[\s*(\{|\]|\Z)")


@dataclass
class LogFile:
    """Input file of a log format.

    `path`           what the user named, for messages
    `content`        the file or folder with its bytes
    `piece`          tokens per piece, if the log has token ids or text
    `encode`         tokenises text
    `skips`          whether invalid lines are skipped; they are counted
    `rows`           whether a row of a session is the whole prompt or the new tokens of a turn;
                     auto: by its fields
    `line_bytes`     most bytes of a line
    `prompt_tokens`  most tokens of a prompt
    `notes`          caveats about the numbers; formats append to it
    `unread`         bytes that were read or left out; a parser that counts nothing has read its
                     whole line
    `counters`       the server's own counters, if the log has readings of them
    `bodies`         BodyOptions, by which the bodies of requests are rendered; None: by default
    `prompts`        Prompts, to which the prompts of bodies are written; None: they are not wanted
    `folder`         the folder whose files are read as one log, of which this is one; None if it is
                     none
    """

    path: Path
    content: Content
    piece: int
    encode: Callable[[str], Tokens]
    skips: bool = False
    rows: str = "auto"
    line_bytes: int = 1 << 27
    prompt_tokens: int = 1 << 24
    notes: list[str] = field(default_factory=list)
    unread: Unread = field(default_factory=Unread)
    counters: Counters = field(default_factory=Counters)
    bodies: Any = None
    prompts: Any = None
    folder: Path | None = None
    # by field: what bad lines are called, with the first of them
    _bad: dict[str, str] = field(default_factory=dict)
    _bad_files: Counter[str] = field(default_factory=Counter)
    _aside: Counter[str] = field(default_factory=Counter)
    _remarks: Counter[str] = field(default_factory=Counter)

    def open(self) -> IO[bytes]:
        """Open the file, decompressed if it is compressed."""
        return open_unpacked(self._requests)

    @property
    def _requests(self) -> Path:
        """The file, or requests.jsonl in a result folder of a vLLM benchmark, or the records of a
        run with one arm."""
        results = self.content.file / "requests.jsonl"
        if results.is_file():
            return results
        records = sorted((self.content.file / "records").glob("*.jsonl"))
        return records[0] if len(records) == 1 else self.content.file

    @property
    def holds_lengths_only(self) -> bool:
        """Whether the file has been read, and none of its requests has content."""
        return bool(self.unread.withheld) and self.unread.withheld == self.unread.requests

    def files(self, suffixes: tuple[str, ...] = (".jsonl",)) -> list[LogFile]:
        """Return the files of a folder by path, with the notes and counts of this one; the file
        itself if it is one.

        What a file holds in memory stays there: read copies of them, as `map(replace, …)` gives.
        """
        if not self.content.file.is_dir():
            return [self]
        names = tuple(suffix + packed for suffix in suffixes for packed in _PACKED)
        paths = sorted(
            path
            for path in self.content.file.rglob("*")
            if path.name.endswith(names) and path.is_file()
        )
        folder = self.content.file
        return [replace(self, path=path, content=Content(path), folder=folder) for path in paths]

    @cached_property
    def head(self) -> bytes:
        """The first bytes, without a byte order mark; empty for a folder without requests.jsonl."""
        if self._requests.is_dir():
            return b""
        with self.open() as file:
            return file.read(_HEAD).removeprefix(_BOM)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield non-empty lines with their line numbers from 1."""
        with self.open() as file:
            for number, line in enumerate(
                iter(partial(file.readline, self.line_bytes + 1), b""), 1
            ):
                if len(line) > self.line_bytes:
                    raise ValueError(f"{self.path}:{number}: {self._too_long('line')}")
                if stripped := line.removeprefix(_BOM).strip():
                    yield number, stripped

    def _too_long(self, what: str) -> str:
        return (
            f"{what}: expected at most {self.line_bytes / (1 << 20):g} MiB; workload.log.line_mib=N allows more, at "
            "some 12 bytes of memory per byte"
        )

    @cached_property
    def document(self) -> list[Any] | None:
        """Items of a file that is a JSON array, or a single JSON object over many lines; None if
        each line is a row."""
        start = self.head.lstrip()
        first, _, others = start.partition(b"\n")
        is_object = start[:1] == b"{" and bool(others) and json_object(first) is None
        if not is_object and not _ARRAY.match(start):
            return None
        with self.open() as file:
            text = file.read(self.line_bytes + 1)
        if len(text) > self.line_bytes:
            if is_object and first.strip() != b"{":
                return None
            raise ValueError(f"log={self.path}: {self._too_long('one JSON value')}")
        try:
            value = parse_json(text.removeprefix(_BOM))
        except orjson.JSONDecodeError as error:
            if is_object and first.strip() != b"{":  # lines, of which the first is damaged
                return None
            values = _values_in(text) if is_object else None
            if values is None:
                raise ValueError(
                    f"log={self.path}: expected one complete JSON value, but {error}"
                ) from error
            return values
        return value if isinstance(value, list) else [value]

    def items(self) -> Iterator[tuple[int, Any]]:
        """Yield numbered lines, or the numbered items of a JSON document."""
        return self.lines() if self.document is None else iter(enumerate(self.document, 1))

    def parsed(
        self,
        parse: Callable[[Any, int], T | None],
        items: Iterator[tuple[int, Any]] | None = None,
        *,
        counts: bool = True,
    ) -> Iterator[T]:
        """Yield what `parse` returns for each item and its number, except None; refuse items with
        an invalid field.

        `items`   numbered items; None: all lines of the file, or all items of a JSON document
        `counts`  whether an item that counts no bytes itself was read as one request
        """
        for number, line in items or self.items():
            seen = self.unread.seen if counts else -1
            try:
                size = len(line if isinstance(line, bytes) else orjson.dumps(line))
                entry = parse(line, number)
            except BadFieldError as error:
                self.refuse(number, str(error), size)
            except (RecursionError, orjson.JSONEncodeError):
                self.refuse(number, "line: expected JSON of at most 250 levels")
            else:
                if self.unread.seen == seen:
                    self.unread.take(size)
                    self.unread.finish()
                if entry is not None:
                    yield entry

    def refuse(self, line: int, problem: str, size: int = 0) -> None:
        """Report an invalid line of `size` bytes: count it by its field if lines are skipped, else
        raise ValueError."""
        is_line = self.__dict__.get("document") is None
        if not self.skips:
            position = f":{line}" if is_line else f": item {line}"
            raise ValueError(
                f"{self.path}{position}: {problem}; workload.log.bad_lines=skip skips such lines"
            )
        kind = re.sub(r"\[\d+\]", "[]", problem.partition(":")[0])
        position = f"{'line' if is_line else 'item'} {line}"
        if self.folder is not None:
            name = str(self.path.relative_to(self.folder))
            self._bad_files[name] += 1
            position += f" of {name}"
        elif self.content.file.is_dir():
            position = f"request {line}"
        self.unread.leave(
            self._bad.setdefault(kind, f"bad lines ({kind}, first in {position})"), size
        )

    def set_aside(self, what: str, count: int = 1) -> None:
        """Count rows that are valid, but no part of any prompt; `what` is a plural."""
        if count:
            self._aside[what] += count

    def remark(self, what: str) -> None:
        """Count a row about which a note says something; `what` is a plural with a verb."""
        self._remarks[what] += 1

    def check_length(self, tokens: int, name: str) -> int:
        """Return the tokens of a prompt; BadFieldError, naming a field, if they exceed the
        limit."""
        if tokens > self.prompt_tokens:
            raise BadFieldError(
                name,
                f"a prompt of at most {self.prompt_tokens:,} tokens, not {tokens:,} (workload.log.prompt_tokens=N "
                "allows more)",
            )
        return tokens

    def start_over(self) -> None:
        """Forget counts, since the file is read again."""
        self.unread.clear()
        if self.prompts is not None:
            self.prompts.clear()
        self.counters = Counters()
        self._bad.clear()
        self._bad_files.clear()
        self._aside.clear()
        self._remarks.clear()

    def all_notes(self) -> tuple[str, ...]:
        """Return the notes of the formats, and what was set aside or left out."""
        aside = (f"not counted: {number:,} {what}" for what, number in self._aside.items())
        remarks = (f"{number:,} {what}" for what, number in self._remarks.items())
        bad_lines = []
        if self._bad_files:
            named = self._bad_files.most_common(_NAMED_FILES)
            names = ", ".join(f"{name} ({number:,})" for name, number in named)
            rest = self._bad_files.total() - sum(number for _, number in named)
            others = len(self._bad_files) - len(named)
            behind = f" and {others:,} other files ({rest:,})" if rest else ""
            bad_lines.append(f"bad lines by file: {names}{behind}")
        return (*dict.fromkeys(self.notes), *remarks, *aside, *self.unread.notes(), *bad_lines)


@dataclass(frozen=True)
class LogFormat:
    """A format of logs.

    `looks_for`   description of the content by which the format is recognised
    `recognises`  returns whether a file has this format
    `read`        yields the requests of a file
    `ids`         meaning of its ids; None: inferred from the ids
    `block`       returns the tokens per block if the log divides prompts into blocks, else None
    `fields`      names of fields or columns that a row needs, for messages about logs of unknown
                  format
    `marks`       sets of keys: a row that has all keys of one is of this format, and of no other
    """

    looks_for: str
    recognises: Callable[[LogFile], bool]
    read: Callable[[LogFile], Iterator[Entry]]
    ids: Ids | None
    block: Callable[[LogFile], int | None] = lambda file: None
    fields: tuple[str, ...] = ()
    marks: tuple[frozenset[str], ...] = ()


def _values_in(text: bytes) -> list[Any] | None:
    """Return the JSON values of a text that stand one behind another, each over many lines; None if
    one is damaged."""
    decoder, values, offset = json.JSONDecoder(), list[Any](), 0
    try:
        decoded = text.removeprefix(_BOM).decode()
        while offset < len(decoded):
            value, offset = decoder.raw_decode(decoded, offset)
            values.append(value)
            while decoded[offset : offset + 1].isspace():
                offset += 1
    except (ValueError, RecursionError):
        return None
    return values


def header_count(file: LogFile, header: Row, name: str) -> int:
    """Return a whole number from 1 up of a file's first line; ValueError names that line."""
    try:
        return header.count(name, least=1)
    except BadFieldError as error:
        raise ValueError(f"{file.path}:1: {error}") from error


def first_row(file: LogFile) -> dict[str, Any]:
    """Return the first JSON object among the first lines; empty if there is none."""
    rows = head_rows(file)
    return rows[0] if rows else {}


def head_rows(file: LogFile) -> list[dict[str, Any]]:
    """Return the JSON objects among the first lines, or the first items of a JSON document."""
    if file.document is not None:
        return [unwrapped(item) for item in file.document[:1000] if isinstance(item, dict)]
    lines = file.head.splitlines(keepends=True)
    rows = [row for line in lines if (row := json_object(line)) is not None]
    # a single line, longer than the head
    if not rows and file.head[:1] == b"{" and len(lines) == 1:
        rows = [json_object(next(file.lines())[1]) or {}]
    return rows


def folder_has(
    file: LogFile,
    recognises: Callable[[dict[str, Any]], bool],
    suffixes: tuple[str, ...] = (".jsonl",),
) -> bool:
    """Return whether a file, or one of the first files of a folder, has a row that a format
    recognises."""
    is_folder = file.content.file.is_dir()
    first = map(replace, file.files(suffixes)[:_TRIED_FILES]) if is_folder else [file]
    return any(has_row(inner, recognises, in_folder=is_folder) for inner in first)


def has_row(
    file: LogFile, recognises: Callable[[dict[str, Any]], bool], *, in_folder: bool
) -> bool:
    """Return whether a file has such a row; a file in a folder may be anything, also broken
    JSON."""
    try:
        rows = head_rows(file)
    except ValueError:
        if not in_folder:
            raise
        return False
    return any(map(recognises, rows))


def by_time(
    files: Sequence[LogFile], read: Callable[[LogFile], Iterator[Timed]], names: Sequence[str]
) -> Iterator[tuple[LogFile, Timed]]:
    """Yield what is read from several files, each in order of time, in order of time; what has no
    time comes at once.

    `names`  fields of a row with its time; a file is opened when its first time has come
    """
    waiting = sorted(
        ((_first_time(replace(file), names), number) for number, file in enumerate(files)),
        reverse=True,
    )
    heap: list[tuple[float, int, Timed, Iterator[Timed]]] = []
    opened: dict[int, LogFile] = {}

    def take(number: int, items: Iterator[Timed]) -> None:
        item = next(items, None)
        if item is None:
            del opened[number]
        else:
            heapq.heappush(heap, (-np.inf if item.at is None else item.at, number, item, items))

    while heap or waiting:
        while waiting and (not heap or waiting[-1][0] <= heap[0][0]):
            number = waiting.pop()[1]
            opened[number] = replace(files[number])
            take(number, read(opened[number]))
        if heap:
            _, number, item, items = heapq.heappop(heap)
            yield opened[number], item
            take(number, items)


def _first_time(file: LogFile, names: Sequence[str]) -> float:
    for row in head_rows(file):
        try:
            time = Row(row).seconds(*names)
        except BadFieldError:
            continue
        if time is not None:
            return time
    return -np.inf


def json_object(text: bytes) -> dict[str, Any] | None:
    """Parse a JSON object; None for any other text."""
    try:
        return parse_object(text).fields
    except BadFieldError:
        return None


def parse_object(item: Any, loads: Callable[[bytes], Any] = orjson.loads) -> Row:
    """Parse a line that is a JSON object, or take an item of a document; raise BadFieldError for
    any other."""
    row = item
    if isinstance(item, bytes):
        try:
            row = parse_json(without_prefix(item), loads)
        except orjson.JSONDecodeError as error:
            raise BadFieldError("line", "JSON") from error
    if isinstance(row, dict):
        row = unwrapped(row)
    else:
        raise BadFieldError(
            "line", f"a JSON object{actual(item.decode() if isinstance(item, bytes) else item)}"
        )
    return Row(row)


def json_lines(
    parse: Callable[[Row, int, LogFile], Entry | None],
) -> Callable[[LogFile], Iterator[Entry]]:
    """Return a reader of JSON lines; `parse` gets object, line number and file, and returns None to
    skip a line."""
    return lambda file: file.parsed(lambda line, number: parse(parse_object(line), number, file))


def lengths_only(tokens: int, number: int, at: float | None, output: int) -> Entry:
    """Return request `number` with known lengths only: a single piece, different from all
    others."""
    return Entry(
        np.array([number], dtype=np.int64), np.array([tokens], dtype=np.int64), number, at, output
    )


# ------------------------------------------------------------------------------
# Registry of log formats, in the order in which they are tried; each format is registered by
# its module.
# ------------------------------------------------------------------------------

#: A registered function has no parameters and returns the format.
LOG_FORMATS: Registry[LogFormat] = Registry(
    "log format",
    order=(
        "ragpulse",
        "claude_code",
        "codex",
        "gemini_cli",
        "otel",
        "langfuse",
        "litellm",
        "sagemaker",
        "trajectory",
        "sharegpt",
        "helicone",
        "portkey",
        "openrouter",
        "guidellm",
        "aiperf",
        "parquet",
        "azure",
        "burstgpt",
        "tracelab",
        "agent_sessions",
        "agentic_mooncake",
        "lmcache",
        "mooncake",
        "tair",
        "sglang",
        "gemini",
        "bedrock",
        "openai",
        "openai_answers",
        "vllm_vcr",
        "vllm_bench",
        "spanlab_records",
        "vllm_events",
    ),
)


#: Texts that are no log of requests: what they are called, and how they are known.
_UNREAD_TEXT: dict[str, re.Pattern[bytes]] = {
    "a console log of vLLM": re.compile(rb"Received request |Avg prompt throughput"),
    "a console log of SGLang without token ids": re.compile(
        rb"Prefill batch|Decode batch|Receive: obj="
    ),
    "a console log of LMCache": re.compile(rb"LMCache.*hit tokens"),
    "a scrape of /metrics": re.compile(rb"^(# (HELP|TYPE) |(vllm|sglang):\w+)", re.MULTILINE),
    "a zip archive, which has to be unpacked": re.compile(rb"\APK\x03\x04"),
    "a text in UTF-16, which has to be UTF-8": re.compile(rb"\A(\xff\xfe|\xfe\xff)"),
}


def detect_format(file: LogFile) -> tuple[str, LogFormat]:
    """Return the first format that matches a file, with its name; ValueError names the nearest one
    if none matches.

    A file whose rows have marks of formats is of one of these, or of none.
    """
    formats = {name: LOG_FORMATS.make(name, {}, {}) for name in LOG_FORMATS}
    rows = [] if file._requests.is_dir() else head_rows(file)
    marked = {
        name: sorted(mark)
        for name, log_format in formats.items()
        for mark in log_format.marks
        if any(mark <= row.keys() for row in rows)
    }
    for name, log_format in formats.items():
        if (not marked or name in marked) and log_format.recognises(file):
            return name, log_format
    problem = _nearest(file)
    for name, mark in marked.items():
        problem = (
            f"rows with {' and '.join(mark)} are of {name}, and none is {formats[name].looks_for}"
        )
    raise ValueError(
        f"log={file.path}: expected a log of a known format; {problem}; docs/logs.md describes all formats"
    )


def _nearest(file: LogFile) -> str:
    """Describe the format that a file of unknown format resembles most, and what it lacks."""
    if file._requests.is_dir():
        return "the folder has no file of a format that is read from folders"
    rows = list(map(Row, head_rows(file)[:50]))
    for name, pattern in _UNREAD_TEXT.items():
        if pattern.search(file.head):
            rates = rates_of(line for _, line in file.lines())
            return f"this looks like {name}" + (f": {rates}" if rates else ", which is not read")
    if rows and {"case", "ranks", "median_us"} <= rows[0].fields.keys():
        return "this looks like a result of vllm bench forward, which has steps and no requests: twin.forward reads it"
    header = file.head.partition(b"\n")[0].decode(errors="replace").strip()
    if header[:1] in ("{", "[") and not any(row.fields for row in rows):
        return (
            "line 1 begins like JSON and is no complete JSON value, and neither is the whole file"
        )
    columns = {key for row in rows for key in row.fields} or set(header.split(","))
    formats = {
        name: fields for name in LOG_FORMATS if (fields := LOG_FORMATS.make(name, {}, {}).fields)
    }
    shares = {
        name: sum(field in columns for field in fields) / len(fields)
        for name, fields in formats.items()
    }
    name = max(shares, key=lambda name: shares[name])
    if shares[name]:
        missing = [field for field in formats[name] if field not in columns]
        lacks = (
            f"whose {' and '.join(missing)} is missing"
            if missing
            else "whose fields have other content"
        )
        return f"the nearest is {name}, {lacks}"
    if not rows:
        kind = (
            "binary data" if b"\0" in file.head else "text that is neither JSON nor a known table"
        )
        return f"the file begins with {kind}"
    return f"no format has rows with the fields {', '.join(sorted(columns)[:5])[:80]}"


# ------------------------------------------------------------------------------
# Reader of CSV logs with a header, row by row.
# ------------------------------------------------------------------------------


def has_header(file: LogFile, names: tuple[str, ...]) -> bool:
    """Return whether the first line of a file names these columns."""
    line = file.head.partition(b"\n")[0].strip().decode(errors="replace")
    try:
        return set(names) <= set(next(csv.reader([line]), []))
    except csv.Error:
        return False


def csv_rows(
    parse: Callable[[Row, int], T], columns: tuple[str, ...]
) -> Callable[[LogFile], Iterator[T]]:
    """Return a reader of CSV with a header; `parse` gets a row as a mapping by column, and its line
    number.

    `columns`  columns that the header may not repeat
    """

    def read_rows(file: LogFile) -> Iterator[T]:
        lines = file.lines()
        first, header = next(lines)
        # a bad header is an error even if bad lines are skipped
        try:
            names = _cells(header)
            for name in columns:
                if names.count(name) > 1:
                    raise BadFieldError("line", f"one column {name}, not {names.count(name)}")
        except BadFieldError as error:
            raise ValueError(f"{file.path}:{first}: {error}") from error

        def parse_line(line: bytes, number: int) -> T:
            values = _cells(line)
            if len(values) != len(names):
                raise BadFieldError("line", f"{len(names)} columns, not {len(values)}")
            return parse(Row(dict(zip(names, values, strict=True))), number)

        yield from file.parsed(parse_line, lines)

    return read_rows


def _cells(line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode()]))
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadFieldError("line", f"one row of CSV as UTF-8 text, not {line[:40]!r}") from error

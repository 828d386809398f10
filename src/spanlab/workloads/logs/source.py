"""What importers read from: numbered lines, fields with their types, and one sentence for each that is bad."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson

from spanlab.core.request import Tokens
from spanlab.workloads.logs.log import Entry, Ids, Ints

_GZIP = b"\x1f\x8b"
_HEAD = 1 << 16  # bytes by which a format is recognised


class BadFieldError(ValueError):
    """A field of a line that is not as its format says: `FIELD: expected X`."""

    def __init__(self, name: str, expected: str) -> None:
        super().__init__(f"{name}: expected {expected}")


@dataclass(frozen=True, slots=True)
class Row:
    """One JSON object or CSV row; a dotted name reaches into objects."""

    fields: dict[str, Any]

    def get(self, *names: str) -> Any:
        """The first of these fields that is there; None where none is."""
        for name in names:
            value: Any = self.fields
            for part in name.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                return value
        return None

    def count(self, *names: str, least: int = 0, default: int | None = None) -> int:
        """A whole number from `least` up."""
        value = self.get(*names)
        if value is None and default is not None:
            return default
        number = _whole(value)
        if number is None or number < least:
            raise BadFieldError(names[0], f"a whole number from {least} up{_found(value)}")
        return number

    def seconds(self, *names: str, scale: float = 1.0) -> float | None:
        """A time: a number in units of `scale` seconds, or a date; None where no field is there."""
        value = self.get(*names)
        if value is None:
            return None
        if isinstance(value, str):
            return _time(value, names[0], scale)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
            raise BadFieldError(names[0], f"a time{_found(value)}")
        return float(value) * scale

    def whole_numbers(self, *names: str) -> Ints:
        """A list of whole numbers, int64."""
        value = self.get(*names)
        try:
            found = np.array(value)
        except ValueError as error:
            raise BadFieldError(names[0], "a list of whole numbers of 64 bits") from error
        if not isinstance(value, list) or found.ndim != 1 or (len(value) and found.dtype.kind not in "iu"):
            raise BadFieldError(names[0], "a list of whole numbers of 64 bits")
        return found.astype(np.int64)


def _whole(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return int(value) if value.strip().isdecimal() else None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if isinstance(value, int) else None


def _time(value: str, name: str, scale: float) -> float:
    try:
        return float(value) * scale
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(value.strip()[:26])  # datetime knows microseconds at most
    except ValueError as error:
        raise BadFieldError(name, f"a number or a date{_found(value)}") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _found(value: object) -> str:
    return ", and it is missing" if value is None else f", not {str(value)[:40]!r}"


@dataclass
class LogFile:
    """A file that an importer reads.

    `piece`   tokens per piece, where the log has token ids or text
    `encode`  tokenises text
    `skips`   bad lines are left out, each with its sentence in `notes`
    `notes`   what a reader of the numbers must know; importers add to it
    """

    path: Path
    piece: int
    encode: Callable[[str], Tokens]
    skips: bool = False
    notes: list[str] = field(default_factory=list)

    def open(self) -> IO[bytes]:
        """The bytes, unpacked where they are packed with gzip."""
        path = self._requests
        with path.open("rb") as file:
            packed = file.read(2) == _GZIP
        return gzip.open(path) if packed else path.open("rb")  # type: ignore[return-value]

    @property
    def _requests(self) -> Path:
        """The file itself, or requests.jsonl in a folder that a benchmark of vLLM left."""
        inside = self.path / "requests.jsonl"
        return inside if inside.is_file() else self.path

    def head(self) -> bytes:
        """The first bytes; none of a folder without requests.jsonl."""
        if self._requests.is_dir():
            return b""
        with self.open() as file:
            return file.read(_HEAD)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Lines that are not empty, with their numbers from 1."""
        with self.open() as file:
            for number, line in enumerate(file, 1):
                if stripped := line.removeprefix(b"\xef\xbb\xbf").strip():
                    yield number, stripped

    def refuse(self, line: int, problem: str) -> None:
        """Say what is wrong with a line: note it and go on, or raise ValueError."""
        said = f"{self.path}:{line}: {problem}"
        if not self.skips:
            raise ValueError(f"{said}; workload.log.bad_lines=skip goes on without such lines")
        self.notes.append(said)


@dataclass(frozen=True)
class LogFormat:
    """A format of logs.

    `looks_for`   what it is recognised by, in words
    `recognises`  whether a file is of this format
    `read`        its requests, one after another
    `ids`         what its ids mean; None: the ids themselves tell
    `block`       tokens per block, where the log cuts prompts itself: from the file, or None
    """

    looks_for: str
    recognises: Callable[[LogFile], bool]
    read: Callable[[LogFile], Iterator[Entry]]
    ids: Ids | None
    block: Callable[[LogFile], int | None] = lambda file: None


def first_row(file: LogFile) -> dict[str, Any]:
    """The first line as a JSON object; empty where it is none."""
    rows = head_rows(file)
    return rows[0] if rows else {}


def head_rows(file: LogFile) -> list[dict[str, Any]]:
    """The JSON objects among the first lines."""
    lines = file.head().removeprefix(b"\xef\xbb\xbf").splitlines(keepends=True)
    if lines and lines[0].strip() in (b"{", b"["):  # one object over many lines, whose parts are no rows
        return []
    found = [row for line in lines if (row := json_object(line)) is not None]
    if not found and file.head()[:1] == b"{" and len(lines) == 1:  # one line, longer than the head
        found = [json_object(next(file.lines())[1]) or {}]
    return found


def json_object(text: bytes) -> dict[str, Any] | None:
    """A JSON object; None for any other text."""
    try:
        row = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def json_lines(parse: Callable[[Row, int, LogFile], Entry | None]) -> Callable[[LogFile], Iterator[Entry]]:
    """A reader of one JSON object a line; `parse` gets the object, its line and the file, None leaves it out."""

    def read(file: LogFile) -> Iterator[Entry]:
        for number, line in file.lines():
            try:
                row = orjson.loads(line)
                if not isinstance(row, dict):
                    raise BadFieldError("line", "a JSON object")
                entry = parse(Row(row), number, file)
            except orjson.JSONDecodeError:
                file.refuse(number, "line: expected JSON")
            except BadFieldError as error:
                file.refuse(number, str(error))
            else:
                if entry is not None:
                    yield entry

    return read


def lengths_only(tokens: int, number: int, at: float | None, output: int) -> Entry:
    """Request `number`, of which nothing but its lengths is known: one piece, equal to no other."""
    return Entry(np.array([number], dtype=np.int64), np.array([tokens], dtype=np.int64), number, at, output)

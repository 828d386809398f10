"""Input of log formats: numbered lines, typed fields, and one-sentence errors for invalid fields."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np
import orjson

from spanlab.core.request import Tokens
from spanlab.workloads.logs.log import LONGEST_S, Entry, Ids, Ints
from spanlab.workloads.logs.unread import Unread

if TYPE_CHECKING:
    from spanlab.workloads.logs.rendering import BodyOptions

T = TypeVar("T")

_GZIP = b"\x1f\x8b"
_HEAD = 1 << 16  # bytes by which a format is recognised
_LARGEST_COUNT = np.iinfo(np.int32).max
_MOST_DIGITS = 99  # int() refuses strings of thousands of digits


class BadFieldError(ValueError):
    """Invalid field of a line: `FIELD: expected X`."""

    def __init__(self, name: str, expected: str) -> None:
        super().__init__(f"{name}: expected {expected}")


@dataclass(frozen=True, slots=True)
class Row:
    """One JSON object or CSV row; a dotted name refers to a field of a nested object."""

    fields: dict[str, Any]

    def get(self, *names: str) -> Any:
        """Return the value of the first of these fields that is present; None if none is."""
        for name in names:
            value: Any = self.fields
            for key in name.split("."):
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                return value
        return None

    def count(self, *names: str, least: int = 0, default: int | None = None) -> int:
        """Return a field as an integer of at least `least`."""
        value = self.get(*names)
        if value is None and default is not None:
            return default
        number = _to_integer(value)
        if number is None or number < least:
            raise BadFieldError(names[0], f"a whole number from {least} up{_actual(value)}")
        if number > _LARGEST_COUNT:
            raise BadFieldError(names[0], f"a whole number below 2^31{_actual(value)}")
        return number

    def counts(self, name: str) -> list[int]:
        """Return a field that is a list of integers from 0 up."""
        numbers = self.whole_numbers(name)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() <= _LARGEST_COUNT:
            raise BadFieldError(name, f"a list of whole numbers from 0 to below 2^31{_actual(self.get(name))}")
        counts: list[int] = numbers.tolist()
        return counts

    def numbers(self, name: str) -> list[float]:
        """Return a field that is a list of finite numbers."""
        values = self.get(name)
        if not isinstance(values, list) or not all(map(_is_finite, values)):
            raise BadFieldError(name, f"a list of numbers{_actual(values)}")
        return values

    def label(self, *names: str) -> str | float | None:
        """Return a field that is a text or a number, such as a session's name; None if no field is present."""
        value = self.get(*names)
        if value is not None and not isinstance(value, (str, int, float)):
            raise BadFieldError(names[0], f"a text or a number{_actual(value)}")
        return value

    def seconds(self, *names: str, scale: float = 1.0) -> float | None:
        """Return a field as seconds: a number in units of `scale` seconds, or a date; None if no field is present."""
        value = self.get(*names)
        if value is None:
            return None
        if isinstance(value, str):
            return _parse_time(value, names[0], scale)
        if not _is_finite(value):
            raise BadFieldError(names[0], f"a time{_actual(value)}")
        return float(value) * scale

    def duration(self, *names: str, scale: float = 1.0) -> float | None:
        """Return a field as `seconds` does, if 64-bit nanoseconds can hold it."""
        duration = self.seconds(*names, scale=scale)
        if duration is not None and abs(duration) > LONGEST_S:
            raise BadFieldError(names[0], f"at most {LONGEST_S:.0e} s{_actual(self.get(*names))}")
        return duration

    def whole_numbers(self, *names: str) -> Ints:
        """Return a field that is a list of integers, int64."""
        value = self.get(*names)
        try:
            numbers = np.array(value)
        except ValueError as error:
            raise BadFieldError(names[0], f"a list of whole numbers of 64 bits{_actual(value)}") from error
        if not isinstance(value, list) or numbers.ndim != 1 or (len(value) and numbers.dtype.kind not in "iu"):
            raise BadFieldError(names[0], f"a list of whole numbers of 64 bits{_actual(value)}")
        return numbers.astype(np.int64)


def _to_integer(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        digits = value.strip()
        return int(digits[:_MOST_DIGITS]) if digits.isdecimal() else None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if isinstance(value, int) else None


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and bool(np.isfinite(value))


def _parse_time(value: str, name: str, scale: float) -> float:
    try:
        number = float(value)
    except ValueError:
        pass
    else:
        if not np.isfinite(number):
            raise BadFieldError(name, f"a number or a date{_actual(value)}")
        return number * scale
    try:
        date = datetime.fromisoformat(value.strip()[:26])  # fromisoformat reads at most microseconds
    except ValueError as error:
        raise BadFieldError(name, f"a number or a date{_actual(value)}") from error
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def _actual(value: object) -> str:
    return ", and it is missing" if value is None else f", not {str(value)[:40]!r}"


@dataclass
class LogFile:
    """Input file of a log format.

    `piece`   tokens per piece, if the log has token ids or text
    `encode`  tokenises text
    `skips`   whether invalid lines are skipped, each with its error in `notes`
    `notes`   caveats about the numbers; formats append to it
    `bodies`  how the bodies of requests are rendered; None: by default
    `unread`  bytes that were read or left out; a parser that counts nothing has read its whole line
    """

    path: Path
    piece: int
    encode: Callable[[str], Tokens]
    skips: bool = False
    notes: list[str] = field(default_factory=list)
    unread: Unread = field(default_factory=Unread)
    bodies: BodyOptions | None = None

    def open(self) -> IO[bytes]:
        """Open the file, decompressed if it is a gzip file."""
        path = self._requests
        with path.open("rb") as file:
            is_gzip = file.read(2) == _GZIP
        return gzip.open(path) if is_gzip else path.open("rb")  # type: ignore[return-value]

    @property
    def _requests(self) -> Path:
        """The file, or requests.jsonl in a result folder of a vLLM benchmark."""
        results = self.path / "requests.jsonl"
        return results if results.is_file() else self.path

    def head(self) -> bytes:
        """Return the first bytes; empty for a folder without requests.jsonl."""
        if self._requests.is_dir():
            return b""
        with self.open() as file:
            return file.read(_HEAD)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield non-empty lines with their line numbers from 1."""
        with self.open() as file:
            for number, line in enumerate(file, 1):
                if stripped := line.removeprefix(b"\xef\xbb\xbf").strip():
                    yield number, stripped

    def parsed(
        self, parse: Callable[[bytes, int], T | None], lines: Iterator[tuple[int, bytes]] | None = None
    ) -> Iterator[T]:
        """Yield what `parse` returns for each line and its number, except None; refuse lines with an invalid field.

        `lines`  numbered lines; None: all lines of the file
        """
        for number, line in lines or self.lines():
            seen = self.unread.seen
            try:
                entry = parse(line, number)
            except BadFieldError as error:
                self.refuse(number, str(error))
                self.unread.leave("bad lines", len(line))
            else:
                if self.unread.seen == seen:
                    self.unread.take(len(line))
                    self.unread.finish()
                if entry is not None:
                    yield entry

    def refuse(self, line: int, problem: str) -> None:
        """Report an invalid line: add a note if lines are skipped, else raise ValueError."""
        message = f"{self.path}:{line}: {problem}"
        if not self.skips:
            raise ValueError(f"{message}; workload.log.bad_lines=skip skips such lines")
        self.notes.append(message)


@dataclass(frozen=True)
class LogFormat:
    """A format of logs.

    `looks_for`   description of the content by which the format is recognised
    `recognises`  returns whether a file has this format
    `read`        yields the requests of a file
    `ids`         meaning of its ids; None: inferred from the ids
    `block`       returns the tokens per block if the log divides prompts into blocks, else None
    """

    looks_for: str
    recognises: Callable[[LogFile], bool]
    read: Callable[[LogFile], Iterator[Entry]]
    ids: Ids | None
    block: Callable[[LogFile], int | None] = lambda file: None


def first_row(file: LogFile) -> dict[str, Any]:
    """Return the first JSON object among the first lines; empty if there is none."""
    rows = head_rows(file)
    return rows[0] if rows else {}


def head_rows(file: LogFile) -> list[dict[str, Any]]:
    """Return the JSON objects among the first lines."""
    lines = file.head().removeprefix(b"\xef\xbb\xbf").splitlines(keepends=True)
    if lines and lines[0].strip() in (b"{", b"["):  # one object of many lines, which are not rows
        return []
    rows = [row for line in lines if (row := json_object(line)) is not None]
    if not rows and file.head()[:1] == b"{" and len(lines) == 1:  # a single line, longer than the head
        rows = [json_object(next(file.lines())[1]) or {}]
    return rows


def json_object(text: bytes) -> dict[str, Any] | None:
    """Parse a JSON object; None for any other text."""
    try:
        return parse_object(text).fields
    except BadFieldError:
        return None


def parse_object(line: bytes) -> Row:
    """Parse a line that is a JSON object; raise BadFieldError for any other line."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BadFieldError("line", "JSON") from error
    if not isinstance(row, dict):
        raise BadFieldError("line", f"a JSON object{_actual(line.decode())}")
    return Row(row)


def json_lines(parse: Callable[[Row, int, LogFile], Entry | None]) -> Callable[[LogFile], Iterator[Entry]]:
    """Return a reader of JSON lines; `parse` gets object, line number and file, and returns None to skip a line."""
    return lambda file: file.parsed(lambda line, number: parse(parse_object(line), number, file))


def lengths_only(tokens: int, number: int, at: float | None, output: int) -> Entry:
    """Return request `number` with known lengths only: a single piece, different from all others."""
    return Entry(np.array([number], dtype=np.int64), np.array([tokens], dtype=np.int64), number, at, output)

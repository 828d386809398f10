"""Reading of input files with one-sentence errors, and atomic writing of output files."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import orjson

Item = TypeVar("Item")

_SHOWN = 40  # characters of a value in an error message
ALTERNATIVES = "workload.source=shape, workload.source=local workload.path=..., or workload.source=hub with network"


class SourceUnavailable(ValueError):  # noqa: N818 - the name describes the state of the source
    """The text, its folder or its tokenizer is not available."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; alternatives: {ALTERNATIVES}")


def existing_file(path: Path | None, key: str, expected: str) -> Path:
    """Return `path` if it is a file; raise SourceUnavailable, naming `key`, if it is absent or a folder."""
    if path is None:
        raise SourceUnavailable(f"{key} is not set; expected {expected}")
    if not path.is_file():
        raise SourceUnavailable(f"{key}={path} is not a file; expected {expected}")
    return path


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: Path, key: str, expected: str, encoding: str = "utf-8", newline: str | None = None) -> str:
    """Read a text; raise ValueError, naming `key`, if it is not UTF-8; `newline` is that of `open`."""
    try:
        with path.open(encoding=encoding, newline=newline) as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}={path} is not UTF-8 text, at byte {error.start}; expected {expected}") from error


def read_csv(
    path: Path | None, columns: Iterable[str], key: str, expected: str, encoding: str = "utf-8"
) -> list[dict[str, str]]:
    """Read the rows of a csv file by column.

    Raises ValueError, naming file and line, for a file without rows, without one of `columns` or with a repeated one,
    and for a row that ends before them.
    """
    path = existing_file(path, key, expected)
    reader = csv.DictReader(io.StringIO(read_text(path, key, expected, encoding, newline=""), newline=""))
    columns, rows = tuple(columns), []
    try:
        for row in reader:
            missing = next((column for column in columns if column in row and row[column] is None), None)
            if missing is not None:
                raise ValueError(f"{key}={path} line {reader.line_num} has no {missing}; expected {expected}")
            rows.append(row)
        names = list(reader.fieldnames or ())
    except csv.Error as error:
        raise ValueError(
            f"{key}={path} line {reader.line_num + 1} is not CSV ({error}); expected {expected}"
        ) from error
    if not rows:
        raise ValueError(f"{key}={path} holds no rows; expected {expected}")
    for column in columns:
        check_one_column(names, column, path, key, expected)
    return rows


def check_one_column(names: Sequence[str], column: str, path: Path, key: str, expected: str) -> None:
    """Raise ValueError, naming file and column, unless the table has one column of this name."""
    if (number := names.count(column)) != 1:
        columns = f"{number} columns" if number else "no column"
        raise ValueError(f"{key}={path} has {columns} {column!r}; expected {expected}")


def read_jsonl(path: Path | None, key: str, expected: str) -> list[JsonRow]:
    """Read one JSON object per line; raise ValueError, naming `key`, for a missing, broken or empty file."""
    path = existing_file(path, key, expected)
    rows = list(_parsed_lines(path, key, expected))
    if not rows:
        raise ValueError(f"{key}={path} holds no rows; expected {expected}")
    return rows


#: Names of the types of fields; Label: the name of a thing.
Label = (str, int)
_JSON_TYPES: dict[type | tuple[type, ...], str] = {
    str: "a string",
    int: "a whole number",
    list: "a list",
    dict: "an object",
    Label: "a string or a whole number",
}


class JsonRow(dict[str, Any]):
    """JSON object, with what error messages say about it.

    `location`  setting, file and line; an object inside a row has the location of the row
    `expected`  content that the file should have
    """

    def __init__(self, fields: dict[str, Any], location: str, expected: str) -> None:
        super().__init__(fields)
        self.location, self.expected = location, expected

    def error(self, problem: str, expected: str | None = None) -> ValueError:
        """Return the error of a row that has this problem; `expected` None: the content of the file."""
        return ValueError(f"{self.location} has {problem}; expected {expected or self.expected}")

    def field(self, name: str, kind: type | tuple[type, ...] = object) -> Any:
        """Return the value of a field; raise ValueError if it is missing or not of type `kind`."""
        if name not in self:
            raise self.error(f"no field {name!r}")
        value = self[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not object):
            raise self.error(f"{name}={shorten(value)}, not {_JSON_TYPES[kind]}")
        return value

    def list_of(self, name: str, kind: type[Item]) -> list[Item]:
        """Return a field that is a list of values of type `kind`, with the errors of `field`."""
        values: list[Item] = self.field(name, list)
        for value in values:
            if not isinstance(value, kind):
                raise self.error(f"{shorten(value)} in {name}, not {_JSON_TYPES[kind]}")
        return values

    def rows(self, name: str) -> list[JsonRow]:
        """Return a field that is a list of objects."""
        return [JsonRow(fields, self.location, self.expected) for fields in self.list_of(name, dict)]

    def row(self, name: str) -> JsonRow:
        """Return a field that is an object."""
        return JsonRow(self.field(name, dict), self.location, self.expected)


def shorten(value: object) -> str:
    """Return the start of a value as JSON, for error messages."""
    text = orjson.dumps(value, default=repr).decode()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def write_atomically(path: Path, write: Callable[[IO[bytes]], None]) -> Path:
    """Write through a temporary file in the same folder and rename it over `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
        # mkstemp makes private files, but other users read a committed shape and a shared cache.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


def _parsed_lines(path: Path, key: str, expected: str) -> Iterator[JsonRow]:
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ValueError(f"{key}={path} line {number} is not JSON ({error}); expected {expected}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{key}={path} line {number} is {shorten(row)}, not a JSON object; expected {expected}")
        yield JsonRow(row, f"{key}={path} line {number}", expected)

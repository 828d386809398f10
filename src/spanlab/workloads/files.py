"""Reading of input files with one-sentence errors, and atomic writing of output files."""

from __future__ import annotations

import atexit
import bz2
import csv
import gzip
import hashlib
import io
import json
import lzma
import os
import select
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from spanlab.core.token_string import Tokens

if TYPE_CHECKING:
    import pyarrow


Item = TypeVar("Item")

_SHOWN = 40  # characters of a value in an error message
ALTERNATIVES = "workload.source=shape, workload.source=local workload.path=..., or workload.source=hub with network"


class SourceUnavailable(ValueError):  # noqa: N818 - the name describes the state of the source
    """The text, its folder or its tokenizer is not available."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; alternatives: {ALTERNATIVES}")


def existing_file(path: Path | None, key: str, expected: str) -> Path:
    """Return `path` if it is a file; raise SourceUnavailable, naming `key`, if it is absent or a
    folder."""
    if path is None:
        raise SourceUnavailable(f"{key} is not set; expected {expected}")
    if not path.is_file():
        raise SourceUnavailable(f"{key}={path} is not a file; expected {expected}")
    return path


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(
    path: Path, key: str, expected: str, encoding: str = "utf-8", newline: str | None = None
) -> str:
    """Read a text; raise ValueError, naming `key`, if it is not UTF-8; `newline` is that of
    `open`."""
    try:
        with path.open(encoding=encoding, newline=newline) as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{key}={path} is not UTF-8 text, at byte {error.start}; expected {expected}"
        ) from error


def read_csv(
    path: Path | None, columns: Iterable[str], key: str, expected: str, encoding: str = "utf-8"
) -> list[dict[str, str]]:
    """Read the rows of a csv file by column.

    Raises ValueError, naming file and line, for a file without rows, without one of `columns` or
    with a repeated one, and for a row that ends before them.
    """
    path = existing_file(path, key, expected)
    reader = csv.DictReader(
        io.StringIO(read_text(path, key, expected, encoding, newline=""), newline="")
    )
    columns, rows = tuple(columns), []
    try:
        for row in reader:
            missing = next(
                (column for column in columns if column in row and row[column] is None), None
            )
            if missing is not None:
                raise ValueError(
                    f"{key}={path} line {reader.line_num} has no {missing}; expected {expected}"
                )
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


def check_one_column(
    names: Sequence[str], column: str, path: Path, key: str, expected: str
) -> None:
    """Raise ValueError, naming file and column, unless the table has one column of this name."""
    if (number := names.count(column)) != 1:
        columns = f"{number} columns" if number else "no column"
        raise ValueError(f"{key}={path} has {columns} {column!r}; expected {expected}")


def read_jsonl(path: Path | None, key: str, expected: str) -> list[JsonRow]:
    """Read one JSON object per line; raise ValueError, naming `key`, for a missing, broken or empty
    file."""
    path = existing_file(path, key, expected)
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ValueError(
                f"{key}={path} line {number} is not JSON ({error}); expected {expected}"
            ) from error
        if not isinstance(row, dict):
            raise ValueError(
                f"{key}={path} line {number} is {shorten(row)}, not a JSON object; expected {expected}"
            )
        rows.append(JsonRow(row, f"{key}={path} line {number}", expected))
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
        """Return the error of a row that has this problem; `expected` None: the content of the
        file."""
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
        return [
            JsonRow(fields, self.location, self.expected) for fields in self.list_of(name, dict)
        ]

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


# ------------------------------------------------------------------------------
# Columns of a Parquet file as NumPy views, with one-sentence errors.
# ------------------------------------------------------------------------------

LARGEST_TOKEN = np.iinfo(np.int32).max


def read_columns(
    path: Path | None, columns: Sequence[str], key: str, expected: str
) -> pyarrow.Table:
    """Read `columns`; raise ValueError for an unreadable or empty file, a missing column or a
    missing value."""
    import pyarrow
    from pyarrow import parquet

    path = existing_file(path, key, expected)
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            for column in columns:
                check_one_column(names, column, path, key, expected)
            table = file.read(columns=list(columns))
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(
            f"{key}={path} is not a readable Parquet file; expected {expected}"
        ) from error
    if table.num_rows == 0:
        raise ValueError(f"{key}={path} holds no rows; expected {expected}")
    for column in columns:
        if table[column].null_count:
            raise ValueError(
                f"{key}={path} has empty values in column {column!r}; expected {expected}"
            )
    return table


def token_lists(
    table: pyarrow.Table, column: str, path: Path, key: str, expected: str, fold: int | None = None
) -> tuple[Tokens, ...]:
    """Return a column of integer lists as int32 token ids, modulo `fold` if given, without a copy
    per row."""
    import pyarrow

    lists = table[column].combine_chunks()
    list_type = lists.type
    is_list = pyarrow.types.is_list(list_type) or pyarrow.types.is_large_list(list_type)
    if not is_list or not pyarrow.types.is_integer(list_type.value_type):
        raise ValueError(
            f"{key}={path} has column {column!r} of type {list_type}; expected lists of integers, as {expected}"
        )
    if lists.values.null_count:
        raise ValueError(
            f"{key}={path} has empty token ids in column {column!r}; expected {expected}"
        )
    offsets = _view(lists.offsets)
    if (np.diff(offsets) == 0).any():
        raise ValueError(
            f"{key}={path} has a row without tokens in column {column!r}; expected {expected}"
        )
    given = _view(lists.values)
    if given.min() < 0 or given.max() > LARGEST_TOKEN:
        raise ValueError(
            f"{key}={path} has column {column!r} with ids from {given.min()} to {given.max()}; "
            f"expected 0 to {LARGEST_TOKEN}"
        )
    ids = (given if fold is None else given % fold).astype(np.int32, copy=False)
    return tuple(
        ids[start:stop]
        for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    )


def integers(
    table: pyarrow.Table, column: str, path: Path, key: str, expected: str
) -> NDArray[np.integer]:
    """Return a column of integers, shape (rows,); raise ValueError for any other type."""
    import pyarrow

    values = table[column].combine_chunks()
    if not pyarrow.types.is_integer(values.type):
        raise ValueError(
            f"{key}={path} has column {column!r} of type {values.type}; expected integers, as {expected}"
        )
    return _view(values)


def group_numbers(
    table: pyarrow.Table, column: str, path: Path, key: str, expected: str
) -> list[int]:
    """Return a column of names as numbers by first appearance."""
    import pyarrow

    values = table[column].combine_chunks()
    if pyarrow.types.is_nested(values.type):
        raise ValueError(
            f"{key}={path} has column {column!r} of type {values.type}; expected names, as {expected}"
        )
    numbers: list[int] = values.dictionary_encode().indices.to_pylist()
    return numbers


def _view(array: pyarrow.Array) -> NDArray[np.integer]:
    # Not array.to_numpy(): that imports pandas, which takes longer than reading the file.
    view: NDArray[Any] = np.from_dlpack(array)  # callers check that the type is an integer
    return view


# ------------------------------------------------------------------------------
# Opening of a log: compressed files, and pipes, which are copied once into a temporary file.
# ------------------------------------------------------------------------------

STANDARD_INPUT = "-"
_COPIES = "SPANLAB_COPIED_PIPES"  # environment variable with the copies of pipes as JSON
_POLL_S = 2.0
_CHUNK = 1 << 20


class Waits(NamedTuple):
    """Limits of reading a pipe: seconds without data, and bytes."""

    wait_s: float = 60.0
    most_bytes: int = 1 << 36


class Content(NamedTuple):
    """Bytes of a log: the file that holds them, and their SHA-256 if they came through a pipe."""

    file: Path
    sha256: str | None = None


def content_of(path: Path, waits: Waits) -> Content:
    """Return the file or folder with the bytes of a log; a pipe, or `-` for standard input, is
    copied first.

    Raises ValueError if there is no such file, if it is a device, and if a pipe exceeds `waits`.
    """
    if is_pipe(path):
        name = str(path)
        if name not in _copies():
            descriptor, copied = tempfile.mkstemp(prefix="spanlab-log-")
            atexit.register(_remove, copied, os.getpid())
            with os.fdopen(descriptor, "wb", buffering=0) as copy:
                digest = _copy(name, copy, waits)
            os.environ[_COPIES] = json.dumps(_copies() | {name: [copied, digest]})
        copied, digest = _copies()[name]
        return Content(Path(copied), digest)
    if not path.exists():
        raise ValueError(
            f"log={path}: no such file; expected a log, or a folder of the RAGPulse trace"
        )
    if not path.is_file() and not path.is_dir():
        raise ValueError(f"log={path}: expected a file, a folder, a pipe, or - for standard input")
    return Content(path)


def is_pipe(path: Path) -> bool:
    """Return whether a log comes through a pipe, which can be read only once."""
    return str(path) == STANDARD_INPUT or path.is_fifo() or str(path) in _copies()


def _copies() -> dict[str, list[str]]:
    """Return file and SHA-256 of each pipe that was copied, by its name; worker processes inherit
    them."""
    copies: dict[str, list[str]] = json.loads(os.environ.get(_COPIES, "{}"))
    return copies


def _remove(file: str, process: int) -> None:
    if os.getpid() == process:  # and not a fork of it
        Path(file).unlink(missing_ok=True)


def _copy(name: str, copy: IO[bytes], waits: Waits) -> str:
    """Copy the data of a pipe, and return its SHA-256."""
    digest, size = hashlib.sha256(), 0
    # Opening a pipe without a writer would block before any message.
    source = 0 if name == STANDARD_INPUT else os.open(name, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while chunk := _next_chunk(source, name, waits.wait_s):
            digest.update(chunk)
            size += len(chunk)
            if size > waits.most_bytes:
                raise ValueError(
                    f"log={name}: expected at most {waits.most_bytes / (1 << 30):g} GiB from a pipe; "
                    "workload.log.pipe_gib=N allows more"
                )
            try:
                copy.write(chunk)
            except OSError as error:
                raise ValueError(
                    f"log={name}: expected room for its data in {tempfile.gettempdir()}, but {error.strerror}; TMPDIR "
                    "names another folder"
                ) from error
    finally:
        if source:
            os.close(source)
    return digest.hexdigest()


def _next_chunk(source: int, name: str, wait_s: float) -> bytes:
    """Return the next bytes of a pipe, empty at its end; ValueError if none come for `wait_s`
    seconds."""
    poll, waited = select.poll(), 0.0
    poll.register(source, select.POLLIN)
    while not poll.poll(min(_POLL_S, wait_s - waited) * 1e3):
        if not waited:
            print(f"log={name}: waits for data, up to {wait_s:g} s", file=sys.stderr, flush=True)
        waited += _POLL_S
        if waited >= wait_s:
            raise ValueError(
                f"log={name}: no data for {wait_s:g} s; expected a program that writes into this pipe, or "
                "workload.log.wait_s=N"
            )
    return os.read(source, _CHUNK)


_BUFFER = 1 << 20  # bytes: lines of logs are long


def open_unpacked(path: Path) -> IO[bytes]:
    """Open a file, decompressed if it is compressed with gzip, bzip2, xz or zstd."""
    with path.open("rb") as file:
        start = file.read(6)
    unpack = next((unpack for magic, unpack in _UNPACK.items() if start.startswith(magic)), None)
    return path.open("rb", _BUFFER) if unpack is None else unpack(path, "rb")


def _open_zstd(path: Path, mode: str) -> io.BufferedReader:
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))


_UNPACK: dict[bytes, Callable[[Path, str], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
    b"\x28\xb5\x2f\xfd": _open_zstd,
}

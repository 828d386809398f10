"""Reader of CSV logs with a header, row by row."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from typing import TypeVar

from spanlab.workloads.logs.source import BadFieldError, LogFile, Row

T = TypeVar("T")


def has_header(file: LogFile, names: tuple[str, ...]) -> bool:
    """Return whether the first line of a file names these columns."""
    line = file.head.partition(b"\n")[0].strip().decode(errors="replace")
    try:
        return set(names) <= set(next(csv.reader([line]), []))
    except csv.Error:
        return False


def csv_rows(parse: Callable[[Row, int], T], columns: tuple[str, ...]) -> Callable[[LogFile], Iterator[T]]:
    """Return a reader of CSV with a header; `parse` gets a row as a mapping by column, and its line number.

    `columns`  columns that the header may not repeat
    """

    def read_rows(file: LogFile) -> Iterator[T]:
        lines = file.lines()
        names = _header(file, *next(lines), columns)

        def parse_line(line: bytes, number: int) -> T:
            values = _cells(line)
            if len(values) != len(names):
                raise BadFieldError("line", f"{len(names)} columns, not {len(values)}")
            return parse(Row(dict(zip(names, values, strict=True))), number)

        yield from file.parsed(parse_line, lines)

    return read_rows


def _header(file: LogFile, number: int, line: bytes, columns: tuple[str, ...]) -> list[str]:
    """Return the column names; a bad header is an error even if bad lines are skipped."""
    try:
        names = _cells(line)
        for name in columns:
            if names.count(name) > 1:
                raise BadFieldError("line", f"one column {name}, not {names.count(name)}")
    except BadFieldError as error:
        raise ValueError(f"{file.path}:{number}: {error}") from error
    return names


def _cells(line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode()]))
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadFieldError("line", f"one row of CSV as UTF-8 text, not {line[:40]!r}") from error

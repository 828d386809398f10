"""Reader of CSV logs with a header, row by row."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from typing import TypeVar

from spanlab.workloads.logs.source import BadFieldError, LogFile, Row

T = TypeVar("T")


def has_header(file: LogFile, names: tuple[str, ...]) -> bool:
    """Return whether the first line of a file names these columns."""
    line = file.head().removeprefix(b"\xef\xbb\xbf").partition(b"\n")[0].decode(errors="replace")
    return set(names) <= set(line.strip().split(","))


def csv_rows(parse: Callable[[Row, int], T]) -> Callable[[LogFile], Iterator[T]]:
    """Return a reader of CSV with a header; `parse` gets a row as a mapping by column, and its line number."""

    def read_rows(file: LogFile) -> Iterator[T]:
        lines = file.lines()
        names = next(csv.reader([next(lines)[1].decode()]))
        for number, line in lines:
            try:
                values = next(csv.reader([line.decode()]))
                if len(values) != len(names):
                    raise BadFieldError("line", f"{len(names)} columns, not {len(values)}")
                yield parse(Row(dict(zip(names, values, strict=True))), number)
            except BadFieldError as error:
                file.refuse(number, str(error))

    return read_rows

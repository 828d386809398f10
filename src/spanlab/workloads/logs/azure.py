"""The Azure LLM inference traces: times and lengths, nothing of what prompts hold."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from typing import TypeVar

from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Ids
from spanlab.workloads.logs.source import BadFieldError, LogFile, LogFormat, Row, lengths_only

T = TypeVar("T")
HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@LOG_FORMATS.register("azure")
def azure() -> LogFormat:
    """A CSV row per request; dates in local time."""
    return LogFormat(
        looks_for=f"CSV with the header {','.join(HEADER)}",
        recognises=lambda file: has_header(file, HEADER),
        read=csv_rows(_parse),
        ids=Ids.NONE,
    )


def _parse(row: Row, line: int) -> Entry:
    tokens, output = row.count("ContextTokens"), row.count("GeneratedTokens")
    return lengths_only(tokens, line, row.seconds("TIMESTAMP"), output)


def has_header(file: LogFile, names: tuple[str, ...]) -> bool:
    """Whether a file begins with a line that names these columns."""
    line = file.head().removeprefix(b"\xef\xbb\xbf").partition(b"\n")[0].decode(errors="replace")
    return set(names) <= set(line.strip().split(","))


def csv_rows(parse: Callable[[Row, int], T]) -> Callable[[LogFile], Iterator[T]]:
    """A reader of CSV with a header; `parse` gets a row by column and its line."""

    def read(file: LogFile) -> Iterator[T]:
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

    return read

"""Tables by declaration: a field is a column, the value that it reads from a row, and the format of its cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spanlab.report.cells import hidden
from spanlab.report.tables import Cell, Column, Table, Value


@dataclass(frozen=True)
class Field:
    """One column of a table, and its cell of any row.

    name, heading, keep, left, explains  as in `Column`
    cell   the format: makes the cell of a value, also of a missing one
    value  the value of a row: a path such as `ttft_s.mean` or `speedup.-1` of keys, attributes and indices, which is
           None where an entry on the way is None; or a function of the row. The path is `name` where it is not given
    empty  values without information: a column with these alone is in CSV and the tracker only
    """

    name: str
    heading: str
    cell: Callable[[Any], Cell]
    value: str | Callable[[Any], Any] = ""
    keep: int = 0
    left: bool = False
    empty: tuple[Value, ...] = ()
    explains: bool = False

    def of(self, row: Any) -> Cell:
        """Return the cell of a row."""
        if callable(self.value):
            return self.cell(self.value(row))
        for key in self.value.split(".") if self.value else [self.name]:
            row = _entry(row, key)
        return self.cell(row)

    def column(self, cells: Sequence[Cell]) -> Column:
        """Return the column of these cells, hidden where none has information."""
        shown = not cells or any(cell.value not in self.empty for cell in cells)
        return Column(self.name, self.heading if shown else "", self.keep, self.left, self.explains)


def _entry(row: Any, key: str) -> Any:
    if row is None:
        return None
    if isinstance(row, Sequence) and key.lstrip("-").isdigit():
        return row[int(key)]
    return row[key] if isinstance(row, Mapping) else getattr(row, key)


def whole(row: Any) -> Any:
    """Return the row itself: the value of a field whose format reads several entries."""
    return row


def with_ends(field: Field, names: str = "") -> tuple[Field, ...]:
    """Return the field of an estimate, and both ends of its interval for CSV and the tracker.

    `names`  pattern of the names of the ends; {} stands for `low` or `high`
    """
    pattern = names or f"{field.name}_{{}}"
    return field, *(_end_of(field, pattern.format(end), end) for end in ("low", "high"))


def _end_of(field: Field, name: str, end: str) -> Field:
    return replace(
        field,
        name=name,
        heading="",
        cell=lambda estimate: hidden(_entry(estimate, end)),
        value=field.value or field.name,
        keep=0,
        left=False,
    )


def tabulate(name: str, title: str, fields: Sequence[Field], rows: Iterable[Any], notes: Sequence[str] = ()) -> Table:
    """Return the table with a row of cells for each of `rows`."""
    lines = tuple(tuple(field.of(row) for field in fields) for row in rows)
    columns = tuple(field.column([line[number] for line in lines]) for number, field in enumerate(fields))
    return Table(name, title, columns, lines, tuple(notes))

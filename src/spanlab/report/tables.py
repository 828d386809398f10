"""The model of a table: values for programs and text for readers. `faces` and `console` render it."""

from __future__ import annotations

from dataclasses import dataclass

from spanlab.report import units

Value = float | int | str | bool | None


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table.

    value  read by CSV, the tracker and the sort order of HTML; None where it is missing
    text   shown to readers
    """

    value: Value
    text: str


MISSING = Cell(None, units.MISSING)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    name     heading in CSV and in the tracker, with the unit: ttft_mean_s
    heading  heading for readers, two lines at most; empty: only CSV and the tracker have the column
    keep     order in which a narrow terminal drops columns, the highest first; 0: never dropped
    left     aligned to the left, as names are
    explains  whether its cells describe the rows: where it is dropped, they are notes below the table
    """

    name: str
    heading: str
    keep: int = 0
    left: bool = False
    explains: bool = False


@dataclass(frozen=True)
class Table:
    """A named table; the first column names the rows.

    title  one line or more above the table; the first line is its heading
    notes  lines below the table
    Raises ValueError where two columns share a name, or a row does not have one cell per column.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names):
            raise ValueError(f"columns of table {self.name}={names}: expected different names")
        for row in self.rows:
            if len(row) != len(names):
                raise ValueError(f"cells of a row of table {self.name}={len(row)}: expected {len(names)}")

    def shown(self) -> Table:
        """Return the table with the visible columns only."""
        return self.with_columns([number for number, column in enumerate(self.columns) if column.heading])

    def with_columns(self, numbers: list[int]) -> Table:
        """Return the table with the columns of these numbers only."""
        columns = tuple(self.columns[number] for number in numbers)
        rows = tuple(tuple(row[number] for number in numbers) for row in self.rows)
        return Table(self.name, self.title, columns, rows, self.notes)

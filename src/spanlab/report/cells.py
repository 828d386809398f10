"""Formats of table cells: each makes a cell, the value with its short text, of a value that may be missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spanlab.report import units
from spanlab.stats import Interval

# ------------------------------------------------------------------------------
# The model of a table: values for programs and text for readers. `faces` and `console` render
# it.
# ------------------------------------------------------------------------------

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


#: A mean with the ends of its interval: an `Interval`, or its entry of `summary.json`, by name or in order.
Estimate = Mapping[str, Any] | Sequence[Any] | None


def word(text: str) -> Cell:
    """A cell whose value is its text."""
    return Cell(text, text)


def placeholder(text: str) -> Cell:
    """Text in place of a missing value."""
    return Cell(None, text)


def hidden(value: Value) -> Cell:
    """A value of a column that only CSV and the tracker have."""
    return Cell(value, "")


def percent(share: float | None) -> Cell:
    """A share between 0 and 1, shown in percent."""
    return Cell(share, units.percent(share))


def signed_percent(share: float | None) -> Cell:
    """A relative error, shown in percent with its sign."""
    return MISSING if share is None else Cell(share, f"{100 * share:+.1f} %")


def seconds(value: float | None) -> Cell:
    """A duration in seconds."""
    return Cell(value, units.seconds(value))


def ratio(value: float | None) -> Cell:
    """A factor."""
    return Cell(value, units.ratio(value))


def count(value: float | None) -> Cell:
    """A count, shown with four digits."""
    return MISSING if value is None else Cell(value, units.count(value))


def byte_size(value: float | None) -> Cell:
    """Bytes, shown in binary units."""
    return MISSING if value is None else Cell(value, units.byte_size(value))


def short(value: float | None) -> Cell:
    """A number, shown with three digits."""
    return MISSING if value is None else Cell(value, units.significant(value))


def number_format(spec: str) -> Callable[[float | None], Cell]:
    """Return the format of a number with this format specification, such as `.1f`."""
    return lambda value: MISSING if value is None else Cell(value, format(value, spec))


def estimate(show: Callable[[float, units.Ends | None], str]) -> Callable[[Estimate], Cell]:
    """Return the format of a mean with the ends of its interval, both given to `show`; missing without a mean."""

    def cell(value: Estimate) -> Cell:
        if value is None:
            return MISSING
        interval = (
            Interval(value["mean"], value["low"], value["high"]) if isinstance(value, Mapping) else Interval(*value)
        )
        return MISSING if interval.mean is None else Cell(interval.mean, show(interval.mean, interval.ends))

    return cell


one_decimal = number_format(".1f")
percent_interval = estimate(units.percent)
seconds_interval = estimate(units.seconds)
ratio_interval = estimate(units.ratio)
nats_interval = estimate(units.nats)

"""Table cells by kind of value: each has the value and its short text."""

from __future__ import annotations

from spanlab.report import units
from spanlab.report.tables import Cell, Value


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


def percent_between(share: float, ends: units.Ends | None) -> Cell:
    """A share with the ends of its interval, shown in percent with one decimal."""
    if ends is None:
        return percent(share)
    return Cell(share, f"{100 * share:.1f} [{100 * ends[0]:.1f}, {100 * ends[1]:.1f}] %")


def seconds(value: float | None, ends: units.Ends | None = None) -> Cell:
    """A duration in seconds, with the ends of its interval where there is one."""
    return Cell(value, units.seconds(value, ends))


def ratio(value: float | None, ends: units.Ends | None = None) -> Cell:
    """A factor, with the ends of its interval where there is one."""
    return Cell(value, units.ratio(value, ends))


def count(value: float) -> Cell:
    """A count, shown with four digits."""
    return Cell(value, units.count(value))


def byte_size(value: float) -> Cell:
    """Bytes, shown in binary units."""
    return Cell(value, units.byte_size(value))

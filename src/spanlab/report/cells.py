"""Formats of table cells: each makes a cell, the value with its short text, of a value that may be missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spanlab.report import units
from spanlab.report.tables import MISSING, Cell, Value
from spanlab.stats import Interval

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


def number(spec: str) -> Callable[[float | None], Cell]:
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


one_decimal = number(".1f")
percent_interval = estimate(units.percent)
seconds_interval = estimate(units.seconds)
ratio_interval = estimate(units.ratio)
nats_interval = estimate(units.nats)

"""Scales, ticks and units of axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axis import Axis


def log_scale(axis: Axis, low: float, high: float) -> None:
    """Set a log axis with plain numbers (0.2, 5, 1000) instead of powers, and fewer ticks over many decades."""
    from matplotlib.axis import XAxis
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.axes.set(**{"xscale" if isinstance(axis, XAxis) else "yscale": "log"})
    decades = high / low
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 300 else (1, 3) if decades < 3e4 else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(plain_number))


def plain_number(value: float, _position: int = 0) -> str:
    """0.05, 3, 20k, 1.5M: short enough for a tick."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def count_ticks(axis: Axis) -> None:
    """Linear ticks as short counts (2000, 20k, 1.5M)."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(plain_number))


@dataclass(frozen=True)
class Unit:
    """A unit for an axis: multiply seconds, or bytes, by `factor`."""

    name: str
    factor: float


def time_unit(largest_s: float) -> Unit:
    """Return the time unit for an axis with this largest value."""
    if largest_s < 1.0:
        return Unit("ms", 1e3)
    if largest_s < 3 * 3600:
        return Unit("s", 1.0)
    return Unit("h", 1 / 3600)


def byte_unit(largest: float) -> Unit:
    """Return the byte unit for an axis with this largest value."""
    name, size = next((unit for unit in (("GiB", 2**30), ("MiB", 2**20)) if largest >= unit[1]), ("KiB", 2**10))
    return Unit(name, 1 / size)


def positive_range(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the smallest and largest positive value, or (0.1, 1) where no value is positive."""
    positive = values[values > 0]
    if not len(positive):
        return 0.1, 1.0
    return float(positive.min()), float(positive.max())


def empirical_cdf(values: NDArray[np.float64], steps: int = 400) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Values and the percentage of the sample at or below each, thinned to at most `steps` steps."""
    ordered = np.sort(values)
    rank = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), steps)).round().astype(int))
    percent = 100.0 * (rank + 1) / len(ordered)
    return np.concatenate([ordered[:1], ordered[rank]]), np.concatenate([[0.0], percent])

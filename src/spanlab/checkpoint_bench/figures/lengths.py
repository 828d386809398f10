"""What the figures share: lengths as shades, short ones light, and an axis of states that begins at none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from spanlab.report import scales

Entries = list[dict[str, Any]]

_LIGHTEST, _DARKEST = 0.82, 0.08
_TICKS = (0, 1, 3, 10, 30, 100, 300, 1000)


def shades(entries: Entries) -> dict[int, str]:
    """A colour for every length, short to long."""
    lengths = sorted({entry["length"] for entry in entries})
    step = (_LIGHTEST - _DARKEST) / max(len(lengths) - 1, 1)
    shade = colormaps["viridis"]
    return {length: to_hex(shade(_LIGHTEST - step * place)) for place, length in enumerate(lengths)}


def of_length(entries: Entries, length: int) -> Entries:
    """Those of one length."""
    return [entry for entry in entries if entry["length"] == length]


def states_axis(ax: Axes, states: Iterable[int]) -> None:
    """States on x: none, then in decades."""
    most = max(states, default=1)
    ax.set_xscale("symlog", linthresh=1, linscale=0.4)
    ax.xaxis.set_major_locator(FixedLocator([tick for tick in _TICKS if tick <= 2 * most]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(scales.plain_number))
    ax.set_xlim(-0.3, 1.6 * max(most, 1))

"""The axis of prompt lengths that figures of prefills share, and the position of its name."""

from __future__ import annotations

from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from spanlab.report.drawing import scales

_TICKS = 3


def length_axis(axis: Axis, lengths: list[float]) -> None:
    """Set a log axis of prompt lengths, short to long, with at most three ticks, all at lengths."""
    scales.log_scale(axis, lengths[0], lengths[-1])
    axis.set_major_locator(FixedLocator(lengths[:: -(-len(lengths) // _TICKS)]))


def below_axes(figure: Figure) -> float:
    """Return the height of the lowest axis name, as a share of the figure: between its ticks and the footer."""
    bottom: float = min(ax.get_position().y0 for ax in figure.axes)
    return bottom - 0.52 / figure.get_figheight()

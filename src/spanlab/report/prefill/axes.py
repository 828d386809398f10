"""The axis of prompt lengths that figures of prefills share, and the names of both axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanlab.report.drawing import scales, style

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_TICKS = 3


def length_axis(axis: Axis, lengths: list[float]) -> None:
    """Set a log axis of prompt lengths, short to long, with at most three ticks, all at lengths."""
    from matplotlib.ticker import FixedLocator

    scales.log_scale(axis, lengths[0], lengths[-1])
    axis.set_major_locator(FixedLocator(lengths[:: -(-len(lengths) // _TICKS)]))


def name_axes(figure: Figure, x: str, y: str) -> None:
    """Name the axes of all panels once: y on the left, x between the lowest ticks and the footer."""
    bottom: float = min(ax.get_position().y0 for ax in figure.axes)
    below = bottom - 0.52 / figure.get_figheight()
    figure.supylabel(y, fontsize=style.LABEL_PT, color=style.INK, x=0.01)
    figure.supxlabel(x, fontsize=style.LABEL_PT, color=style.INK, y=below)

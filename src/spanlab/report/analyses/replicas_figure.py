"""The figure of the analysis `replicas`: how busy each replica is, by routing or by another swept setting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from spanlab.report.drawing import style
from spanlab.report.sweep.data import SweepPoint, footer_of, value_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_busy(points: Sequence[SweepPoint]) -> Figure:
    """A column of dots per arm and point, one dot for each replica."""
    arms = list(points[0].findings("replicas")["arms"])
    figure, [[axes]] = style.framed_with(footer_of(points), "How busy each replica is", margins=style.margins_for(arms))
    positions = np.arange(len(points))
    for number, arm in enumerate(arms):
        shift = (number - (len(arms) - 1) / 2) * 0.6 / len(arms)
        for position, point in zip(positions, points, strict=True):
            busy = point.findings("replicas")["arms"][arm]["busy_fraction"]
            axes.scatter(
                np.full(len(busy), position + shift),
                100 * np.array(busy),
                s=18,
                color=f"C{number}",
                label=arm if position == 0 else None,
            )
    axes.set_xticks(positions, [value_text(point.value) for point in points], rotation=20, ha="right")
    axes.set_ylim(bottom=0)
    style.label(axes, "", "share of the time in which steps run (%)")
    style.legend_right(axes)
    return figure

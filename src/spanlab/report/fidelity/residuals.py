"""Errors of predicted step times, by the amount of each kind of work in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from spanlab.analysis.points import Point
from spanlab.report.drawing import scales, style
from spanlab_sim.calibrated import TERMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLS = 4
_COLOUR = "#0072b2"


def draw(points: Sequence[Point], errors: NDArray[np.float64], footer: str) -> Figure:
    """Draw a plot per varying term, of steps with a positive count; errors are of shapes left out of the fit."""
    counts = {name: np.array([term(point.features) for point in points]) for name, term in TERMS.items()}
    varying = {name: count for name, count in counts.items() if count.min() < count.max()}
    figure, axes = style.panels(
        footer,
        "Error of predicted step times by what a step does (steps whose shape was left out of the fit)",
        len(varying),
        _COLS,
        (1.4, 1.6),
        share=("none", "all"),
        margins=style.Margins(top=0.6),
        hspace=0.75,
        wspace=0.12,
    )
    for ax, (name, count) in zip(axes, varying.items(), strict=True):
        _draw_term(ax, name, count, errors)
    below = 0.45 / figure.get_figheight()
    figure.supxlabel("units of the term in one step", fontsize=style.LABEL_PT, color=style.INK, y=below)
    figure.supylabel("predicted ÷ measured - 1 (%)", fontsize=style.LABEL_PT, color=style.INK, x=0.01)
    return figure


def _draw_term(ax: Axes, name: str, count: NDArray[np.int64], errors: NDArray[np.float64]) -> None:
    some = count > 0
    ax.plot(count[some], 100 * errors[some], ".", color=_COLOUR, markersize=3, alpha=0.5)
    ax.axhline(0, color=style.INK, linewidth=0.8)
    scales.log_scale(ax.xaxis, float(count[some].min()), 1e3 * float(count[some].max()))  # small: room for few ticks
    ax.set_title(name, fontsize=8, loc="left", color=style.INK, pad=3)
    ax.tick_params(labelsize=7)

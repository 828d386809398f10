"""The simulator's error in the means by load, with its interval over the engine's repeats."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from spanlab.analysis.compare import ArmComparison, by_load
from spanlab.analysis.errors import errors
from spanlab.analysis.goals import GOALS, load_words
from spanlab.report.drawing import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHOWN = {"ttft_s": "mean TTFT", "e2e_s": "mean E2E latency"}
_WIDTH = 0.8  # share of the width of a load that its arms fill


def draw(comparisons: list[ArmComparison], footer: str) -> Figure | None:
    """Draw the signed error of each arm's means; bars: 90 % interval over repeats; band: the goal.

    An error is shown to be within the goal where its whole bar lies in the band.
    """
    if not comparisons or all(len(comparison.measured) < 2 for comparison in comparisons):
        return None
    loads = by_load(comparisons)
    drawn = style.strokes({comparison.arm: comparison.family for comparison in comparisons}.items())
    figure, axes = style.framed_with(
        footer,
        "Error of simulated means by load; bars: 90 % interval over the engine's repeats",
        2,
        1,
        height=6.2,
        share=("all", "none"),
        margins=style.Margins(right=0.75 + 0.072 * max(map(len, drawn)), bottom=1.25),
        hspace=0.16,
    )
    for [ax], (metric, label) in zip(axes, _SHOWN.items(), strict=True):
        limit = next(100 * goal.limit for goal in GOALS if goal.metric == metric and goal.error == "bias")
        ax.axhspan(-limit, limit, color=style.FAINT, alpha=0.6, zorder=0)
        ax.axhline(0, color=style.INK, linewidth=0.8)
        for number, (arm, stroke) in enumerate(drawn.items()):
            per_load = [next((comparison for comparison in load if comparison.arm == arm), None) for load in loads]
            shift = _WIDTH * ((number + 0.5) / len(drawn) - 0.5)
            _draw_arm(ax, arm, stroke, per_load, metric, shift)
        style.label(ax, "", f"error of {label} (%)")
    axes[0][0].tick_params(labelbottom=False)
    axes[-1][0].set_xticks(range(len(loads)), [load_words(load[0].share, load[0].rate_rps) for load in loads])
    style.legend_right(axes[0][0])
    return figure


def _draw_arm(
    ax: Axes, arm: str, stroke: style.Stroke, per_load: list[ArmComparison | None], metric: str, shift: float
) -> None:
    errors_by_load = [
        (number, errors(comparison.measured, comparison.predicted)[metric])
        for number, comparison in enumerate(per_load)
        if comparison is not None
    ]
    reach = np.array([_reach(values["bias"], values["bias_interval"]) for _, values in errors_by_load])
    ax.errorbar(
        [number + shift for number, _ in errors_by_load],
        [100 * values["bias"] for _, values in errors_by_load],
        100 * reach.reshape(-1, 2).T,
        fmt=stroke.marker,
        color=stroke.colour,
        markersize=5,
        elinewidth=1.2,
        label=arm,
    )


def _reach(bias: float, interval: tuple[float, float] | None) -> tuple[float, float]:
    """Return the lengths of a bar below and above: 0 without an interval, 0 above where its end is infinite."""
    if interval is None:
        return 0.0, 0.0
    low, high = interval
    return max(bias - low, 0.0), max(high - bias, 0.0) if math.isfinite(high) else 0.0

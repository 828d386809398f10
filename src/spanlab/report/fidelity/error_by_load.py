"""The simulator's error in the means by load, with its interval over the engine's repeats."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spanlab.analysis.compare import Compared, by_load
from spanlab.analysis.errors import errors
from spanlab.analysis.goals import GOALS, load_words
from spanlab.report.drawing import style

_SHOWN = {"ttft_s": "mean TTFT", "e2e_s": "mean E2E latency"}
_WIDTH = 0.8  # of the room of a load that its arms share


def draw(found: list[Compared], footer: str) -> Figure | None:
    """Signed error of each arm's means; bars: 90 % interval over repeats; band: the goal.

    An error is shown to be within the goal where its whole bar lies in the band.
    """
    if not found or all(len(one.measured) < 2 for one in found):
        return None
    loads = by_load(found)
    drawn = style.strokes({one.arm: one.family for one in found}.items())
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
    for [ax], (metric, words) in zip(axes, _SHOWN.items(), strict=True):
        limit = next(100 * goal.limit for goal in GOALS if goal.metric == metric and goal.error == "bias")
        ax.axhspan(-limit, limit, color=style.FAINT, alpha=0.6, zorder=0)
        ax.axhline(0, color=style.INK, linewidth=0.8)
        for place, (arm, stroke) in enumerate(drawn.items()):
            own = [next((one for one in load if one.arm == arm), None) for load in loads]
            shift = _WIDTH * ((place + 0.5) / len(drawn) - 0.5)
            _draw_arm(ax, arm, stroke, own, metric, shift)
        style.label(ax, "", f"error of {words} (%)")
    axes[0][0].tick_params(labelbottom=False)
    axes[-1][0].set_xticks(range(len(loads)), [load_words(load[0].share, load[0].rate_rps) for load in loads])
    style.legend_right(axes[0][0])
    return figure


def _draw_arm(ax: Axes, arm: str, stroke: style.Stroke, own: list[Compared | None], metric: str, shift: float) -> None:
    found = [(place, errors(one.measured, one.predicted)[metric]) for place, one in enumerate(own) if one is not None]
    reach = np.array([_reach(values["bias"], values["bias_interval"]) for _, values in found])
    ax.errorbar(
        [place + shift for place, _ in found],
        [100 * values["bias"] for _, values in found],
        100 * reach.reshape(-1, 2).T,
        fmt=stroke.marker,
        color=stroke.colour,
        markersize=5,
        elinewidth=1.2,
        label=arm,
    )


def _reach(bias: float, interval: tuple[float, float] | None) -> tuple[float, float]:
    """Lengths of a bar below and above; none without an interval, none above where it has no end."""
    if interval is None:
        return 0.0, 0.0
    low, high = interval
    return max(bias - low, 0.0), max(high - bias, 0.0) if math.isfinite(high) else 0.0

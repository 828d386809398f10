"""Common prefix of each prompt with any earlier prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from spanlab.report.data import StudyData
from spanlab.report.drawing import scales, style
from spanlab.report.figures import FIGURES
from spanlab.report.figures.representatives import reference

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BINS = 40
_COLOUR = "#0072b2"


@FIGURES.register("common_prefix")
def draw(study: StudyData) -> Figure | None:
    """Draw the distribution of the common prefix, equal for all arms: in tokens (left), as share of prompt (right).

    Read from an arm that looks up prefixes: other arms may serve passages in another order.
    """
    arms = [arm for arm in study.arms if arm.summary["finds"] == "prefixes"]
    arm = reference(arms) or next(iter(arms), None)
    if arm is None or not len(arm.columns["seen_tokens"]):
        return None
    prefix = np.asarray(arm.columns["seen_tokens"], dtype=np.float64)
    share = 100.0 * prefix / np.maximum(arm.columns["prompt_tokens"], 1)
    figure, axes = style.framed_with(
        study.provenance,
        "Common prefix with any earlier prompt",
        rows=2,
        cols=2,
        share=("col", "row"),
        hspace=0.12,
        wspace=0.08,
    )
    for column, values, high, unit in ((0, prefix, max(float(prefix.max()), 1.0), "tokens"), (1, share, 100.0, "%")):
        _draw_histogram(axes[0][column], values, high)
        _draw_cdf(axes[1][column], values, high, unit)
    scales.count_ticks(axes[1][0].xaxis)
    style.label(axes[0][0], y=f"requests (of {len(prefix)})")
    style.label(axes[1][0], "common prefix (tokens)", "requests at or below (%)")
    style.label(axes[1][1], "common prefix (% of prompt tokens)")
    return figure


def _draw_histogram(ax: Axes, values: NDArray[np.float64], high: float) -> None:
    counts, edges = np.histogram(values, bins=_BINS, range=(0.0, high))
    ax.stairs(counts, edges, fill=True, color=_COLOUR, alpha=0.75)


def _draw_cdf(ax: Axes, values: NDArray[np.float64], high: float, unit: str) -> None:
    median = float(np.median(values))
    ax.plot(*scales.empirical_cdf(values), color=_COLOUR, drawstyle="steps-post", linewidth=1.5)
    ax.axvline(median, color=style.INK, linewidth=0.8, linestyle=(0, (4, 2)))
    on_left = median > high / 2
    ax.annotate(
        f"median {median:,.0f} {unit}",
        (median, 85 if on_left else 12),  # a CDF leaves this corner free
        xytext=(-5 if on_left else 5, 0),
        textcoords="offset points",
        ha="right" if on_left else "left",
        fontsize=style.TICK_PT,
        color=style.INK,
    )
    ax.set_xlim(0, 1.01 * high)
    ax.set_ylim(0, 102)

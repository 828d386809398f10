"""Prompt length against time to first token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from spanlab.report import measures
from spanlab.report.data import ArmData, StudyData
from spanlab.report.drawing import scales, style
from spanlab.report.figures import FIGURES
from spanlab.report.figures.representatives import best_of_families

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ARMS = 6
_BINS = 9
_KEY_TITLE = "median, band: quartiles"


@FIGURES.register("length_ttft")
def draw(study: StudyData) -> Figure | None:
    """Draw TTFT by prompt length: median and quartiles per bin of equal counts, over faint single requests.

    Arms whose queue grows are omitted.
    """
    arms = [arm for arm in best_of_families(measures.stable(study.arms), _ARMS) if len(arm.columns["prompt_tokens"])]
    if not arms:
        return None
    figure, [[ax]] = style.framed_with(
        study.provenance,
        "Time to first token by prompt length",
        margins=style.margins_for([*(arm.name for arm in arms), _KEY_TITLE[:-6]]),
    )
    unit = scales.time_unit(max(float(measures.ttft_s(arm).max()) for arm in arms))
    strokes = style.strokes((arm.name, arm.family) for arm in arms)
    seconds = np.concatenate([measures.ttft_s(arm) for arm in arms]) * unit.factor
    low, high = scales.positive_range(seconds)
    scales.log_scale(ax.yaxis, low, high)
    ax.set_ylim(low / 1.2, high * 1.2)
    for arm in arms:
        _draw_arm(ax, arm, strokes[arm.name], unit.factor)
    style.label(ax, "prompt length (tokens)", f"TTFT ({unit.name})")
    style.legend_right(ax, title=_KEY_TITLE, title_fontsize=8, alignment="left")
    return figure


def binned_quartiles(
    length: NDArray[np.int64], value: NDArray[np.float64], bins: int = _BINS
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the median length and the three quartiles (shape [3, bins]) of `value` in bins of equal counts."""
    order = np.argsort(length, kind="stable")
    groups = [group for group in np.array_split(order, min(bins, len(order))) if len(group)]
    middle = np.array([np.median(length[group]) for group in groups])
    return middle, np.array([np.percentile(value[group], (25, 50, 75)) for group in groups]).T


def _draw_arm(ax: Axes, arm: ArmData, stroke: style.Stroke, factor: float) -> None:
    length, value = arm.columns["prompt_tokens"], measures.ttft_s(arm) * factor
    middle, (lower, median, upper) = binned_quartiles(length, value)
    ax.plot(length, value, ",", color=stroke.colour, alpha=0.3, rasterized=True, zorder=1)
    ax.fill_between(middle, lower, upper, color=stroke.colour, alpha=0.2, linewidth=0, zorder=2)
    ax.plot(middle, median, markersize=5, label=arm.name, zorder=3, **stroke.options)

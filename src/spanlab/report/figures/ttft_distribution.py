"""Distribution of the time to first token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from spanlab.report import measures
from spanlab.report.data import StudyData
from spanlab.report.drawing import scales, style
from spanlab.report.figures import FIGURES
from spanlab.report.figures.representatives import best_of_families

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ARMS = 6


@FIGURES.register("ttft_distribution")
def draw(study: StudyData) -> Figure | None:
    """Draw the empirical CDF of TTFT for references and the best arm of each main family, without saturated arms."""
    arms = [arm for arm in best_of_families(measures.stable(study.arms), _ARMS) if len(arm.columns["prompt_tokens"])]
    if not arms:
        return None
    figure, [[ax]] = style.framed_with(
        study.provenance, "Distribution of time to first token", margins=style.margins_for(arm.name for arm in arms)
    )
    strokes = style.strokes((arm.name, arm.family) for arm in arms)
    unit = scales.time_unit(max(float(measures.ttft_s(arm).max()) for arm in arms))
    values = {arm.name: measures.ttft_s(arm) * unit.factor for arm in arms}
    low, high = scales.positive_range(np.concatenate(list(values.values())))
    scales.log_scale(ax.xaxis, low, high)
    ax.set_xlim(low / 1.1, high * 1.1)
    for name, stroke in strokes.items():
        x, percent = scales.empirical_cdf(values[name])
        x = np.maximum(x, low / 1.1)
        ax.plot(x, percent, color=stroke.colour, linestyle=stroke.line, drawstyle="steps-post", label=name)
    ax.set_ylim(0, 101)
    style.label(ax, f"TTFT ({unit.name})", "requests at or below (%)")
    style.legend_right(ax)
    return figure

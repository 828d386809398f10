"""Positions of the states of one group of requests, by visit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from spanlab.report.data import ArmData, StudyData
from spanlab.report.drawing import scales, style
from spanlab.report.figures import FIGURES, multiples
from spanlab.report.figures.representatives import best_of_families

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_ARMS = 8
_COLS = 4
_PROMPT, _MATCH, _STATE, _RESUME = "#e2e2e2", "#e0867c", "#1a1a1a", "#0072b2"
_ROW_FILL = 0.72
_RASTER_FROM = 3000


@FIGURES.register("checkpoint_positions")
def draw(study: StudyData) -> Figure | None:
    """Draw stored states (dots) over match (red) and prompt (light) of each visit of one group, first seed."""
    from matplotlib.ticker import MaxNLocator

    arms = best_of_families((arm for arm in study.arms if _has_states(arm)), _ARMS)
    if not arms:
        return None
    figure, panels = multiples.small_multiples(
        study, "Checkpoint positions of one group of requests", [arm.name for arm in arms], _COLS
    )
    visits = [arm.runs[0]["group_rounds"] for arm in arms]
    last = max(visit["round"] for rounds in visits for visit in rounds)
    panels[0].set_xlim(0, 1.02 * max(visit["prompt"] for rounds in visits for visit in rounds))
    panels[0].set_ylim(last + 0.7, min(visit["round"] for rounds in visits for visit in rounds) - 0.7)
    for ax, rounds in zip(panels, visits, strict=True):
        _draw_arm(ax, rounds)
    panels[0].yaxis.set_major_locator(MaxNLocator(6, integer=True))
    scales.count_ticks(panels[0].xaxis)
    multiples.label_outer(figure, "position in prompt (tokens)", "visit (number)")
    multiples.legend_top(figure, _handles())
    return figure


def _has_states(arm: ArmData) -> bool:
    return bool(arm.runs) and any(visit["positions"] for visit in arm.runs[0].get("group_rounds", ()))


def _draw_arm(ax: Axes, rounds: list[dict[str, Any]]) -> None:
    number = np.array([visit["round"] for visit in rounds], dtype=float)
    bar_pt = _row_height_pt(ax) * _ROW_FILL
    for key, colour in (("prompt", _PROMPT), ("match", _MATCH)):
        ax.hlines(number, 0, [visit[key] for visit in rounds], color=colour, linewidth=bar_pt, zorder=1)
    positions = np.concatenate([np.asarray(visit["positions"], dtype=float) for visit in rounds])
    rows = np.repeat(number, [len(visit["positions"]) for visit in rounds])
    size = float(np.clip(0.6 * bar_pt, 1.0, 3.2))
    ax.plot(positions, rows, "o", color=_STATE, markersize=size, markeredgewidth=0, rasterized=len(rows) > _RASTER_FROM)
    resumed = [(visit["resume"], visit["round"]) for visit in rounds if visit["resume"]]
    if resumed:
        ax.plot(*zip(*resumed, strict=True), "o", color=_RESUME, markersize=size + 2, mec="white", mew=0.7)


def _row_height_pt(ax: Axes) -> float:
    bottom, top = ax.get_ylim()
    return float(ax.bbox.height) / style.DPI * 72 / abs(bottom - top)


def _handles() -> list[Line2D]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], color=_PROMPT, linewidth=6, label="prompt"),
        Line2D([], [], color=_MATCH, linewidth=6, label="match"),
        Line2D([], [], color=_STATE, marker="o", markersize=3.5, linestyle="", label="state held"),
        Line2D([], [], color=_RESUME, marker="o", markersize=5.5, linestyle="", label="state resumed from"),
    ]

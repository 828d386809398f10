"""Resident bytes against reused tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanlab.report import measures
from spanlab.report.data import ArmData, StudyData
from spanlab.report.drawing import style
from spanlab.report.drawing.scales import Unit
from spanlab.report.figures import FIGURES
from spanlab.report.figures.pareto import HEIGHT_IN, Point, draw_labels, draw_points, resident_label, resident_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BOUND = "infinite cache"


@FIGURES.register("pareto_tokens")
def draw(study: StudyData) -> Figure | None:
    """Draw reused tokens over resident bytes: a point per arm, a line per family, and the infinite-cache bounds."""
    if not study.arms or measures.bytes_say_little(study.arms):
        return None
    figure, [[ax]] = style.framed_with(
        study.provenance,
        f"Reused tokens by resident bytes · store: {study.store}",
        height=HEIGHT_IN,
        margins=style.margins_for(
            (*(arm.family for arm in study.arms), "Pareto frontier", "hollow: store full", _BOUND)
        ),
    )
    unit = resident_unit(study)
    points = [_point(arm, unit) for arm in study.arms]
    shown = draw_points(ax, points, larger_is_better=True)
    bounds = measures.bounds_percent(arm.summary for arm in study.arms)
    for finds, percent in bounds.items():
        label = _BOUND if len(bounds) == 1 else f"{_BOUND}:\n{finds}"
        ax.axhline(percent, color=style.INK, linewidth=1, linestyle=style.BOUND_LINES[finds], label=label)
    top = max([*bounds.values(), *(point.y for point in points)])
    ax.set_ylim(-0.04 * (top or 1), 1.08 * (top or 1))
    style.label(ax, resident_label(study), "reused tokens (% of prompt tokens)")
    draw_labels(ax, shown, bounds.values())
    style.legend_right(ax)
    return figure


def _point(arm: ArmData, unit: Unit) -> Point:
    half = measures.saved_half_width_percent(arm.summary)
    return Point(
        arm.name,
        arm.family,
        measures.resident_bytes(arm) * unit.factor,
        measures.saved_percent(arm),
        measures.resident_half_width(arm) * unit.factor,
        (half, half),
        saves=bool(arm.summary["tokens"]["reused"]),
        full=measures.evicts(arm),
    )

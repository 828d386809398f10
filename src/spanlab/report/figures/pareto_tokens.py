"""Resident bytes against tokens saved."""

from __future__ import annotations

from matplotlib.figure import Figure

from spanlab.report import look, measures
from spanlab.report.data import ArmData, StudyData
from spanlab.report.pareto import HEIGHT_IN, Point, draw_labels, draw_points


def draw(study: StudyData) -> Figure | None:
    """What a byte of cache buys: one point per arm, one line per family, the infinite-cache bound above."""
    if not study.arms:
        return None
    figure, [[ax]] = look.framed(
        study,
        f"Tokens saved by resident bytes · store: {study.store}",
        height=HEIGHT_IN,
        margins=look.margins_for((*(arm.family for arm in study.arms), "Pareto frontier")),
    )
    points = [_point(arm) for arm in study.arms]
    shown = draw_points(ax, points, larger_is_better=True)
    bound = measures.bound_percent(study)
    if bound is not None:
        ax.axhline(bound, color=look.INK, linewidth=1, linestyle=(0, (4, 2)), label="infinite cache")
    top = max([bound or 0.0, *(point.y for point in points)])
    ax.set_ylim(-0.04 * (top or 1), 1.08 * (top or 1))
    look.label(ax, "resident bytes, KV + states, mean over time (GiB)", "tokens saved (% of prompt tokens)")
    draw_labels(ax, shown, bound)
    look.legend_right(ax)
    return figure


def _point(arm: ArmData) -> Point:
    half = measures.saved_half_width_percent(arm)
    return Point(
        arm.name,
        arm.family,
        measures.resident_gib(arm),
        measures.saved_percent(arm),
        measures.resident_half_width_gib(arm),
        (half, half),
        saves=bool(arm.summary["tokens"]["reused"]),
    )

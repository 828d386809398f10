"""Resident bytes against mean time to first token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanlab.report import measures
from spanlab.report.data import ArmData, StudyData
from spanlab.report.drawing import scales, style
from spanlab.report.figures import FIGURES
from spanlab.report.figures.pareto import HEIGHT_IN, Point, draw_labels, draw_points, resident_label, resident_unit
from spanlab.report.figures.representatives import reference

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOG_FROM = 12.0


@FIGURES.register("pareto_ttft")
def draw(study: StudyData) -> Figure | None:
    """Draw mean TTFT with its 95 % interval over resident bytes, and full recompute as a line."""
    measured = [arm for arm in study.arms if arm.summary["ttft_s"]["mean"] is not None]
    unit = scales.time_unit(max((arm.summary["ttft_s"]["mean"] for arm in measured), default=0.0))
    byte_unit = resident_unit(study)
    points = [_point(arm, unit.factor, byte_unit) for arm in measured if not measures.is_full_recompute(arm)]
    if not points or measures.bytes_say_little(study.arms):
        return None
    figure, [[ax]] = style.framed_with(
        study.provenance,
        f"Time to first token by resident bytes · store: {study.store}",
        height=HEIGHT_IN,
        margins=style.margins_for((*(arm.family for arm in study.arms), "Pareto frontier", "hollow: store full")),
    )
    none = reference(measured)
    level = none.summary["ttft_s"]["mean"] * unit.factor if none else None
    if none and level is not None:
        ax.axhline(level, color=style.family_style("none")[0], linewidth=1, linestyle=(0, (4, 2)), label=none.name)
    shown = draw_points(ax, points, larger_is_better=False)
    _scale_y(ax, [point.y for point in points] + ([] if level is None else [level]))
    style.label(ax, resident_label(study), f"mean TTFT ({unit.name})")
    draw_labels(ax, shown, [] if level is None else [level])
    style.legend_right(ax)
    return figure


def _point(arm: ArmData, factor: float, byte_unit: scales.Unit) -> Point:
    ttft = measures.mean_ttft(arm.summary)
    mean, (low, high) = ttft.mean, ttft.ends or (ttft.mean, ttft.mean)
    return Point(
        arm.name,
        arm.family,
        measures.resident_bytes(arm) * byte_unit.factor,
        mean * factor,
        measures.resident_half_width(arm) * byte_unit.factor,
        (factor * max(mean - low, 0.0), factor * max(high - mean, 0.0)),
        saves=bool(arm.summary["tokens"]["reused"]),
        full=measures.evicts(arm),
    )


def _scale_y(ax: Axes, levels: list[float]) -> None:
    low, high = min(levels), max(levels)
    if low > 0 and high > _LOG_FROM * low:
        scales.log_scale(ax.yaxis, low, high)
        ax.set_ylim(low / 1.4, high * 1.4)
    else:
        ax.set_ylim(0, 1.1 * high or 1)

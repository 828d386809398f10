"""The figure of the analysis `tiers`: hits and TTFT side by side, over one swept number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spanlab.report.drawing import style
from spanlab.report.drawing.scales import log_scale
from spanlab.report.sweep.data import SweepPoint, axis_name, footer_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_tiers(points: Sequence[SweepPoint]) -> Figure | None:
    """Draw hit rate and mean TTFT of every arm without saturated points; None where the axis is not numeric."""
    if len(points) < 2 or not all(isinstance(point.value, float) and point.value > 0 for point in points):
        return None
    title, axis = "Hits and TTFT by a tier below the device", axis_name(points[0].axis)
    figure, [[hits, ttft]] = style.framed_with(footer_of(points), title, cols=2, wspace=0.3)
    _panel(hits, points, "token_hit_rate", 100)
    _panel(ttft, points, "ttft_mean_s", 1000)
    style.label(hits, axis, "token hit rate (%)")
    style.label(ttft, axis, "mean TTFT (ms)")
    hits.set_ylim(0, 100)
    log_scale(ttft.yaxis, *ttft.dataLim.intervaly)
    hits.legend(fontsize=style.TICK_PT, frameon=False)
    return figure


def _panel(axes: Axes, points: Sequence[SweepPoint], key: str, factor: float) -> None:
    """One measure of every arm, over the swept number on a log scale."""
    for arm, stroke in style.strokes((arm, arm) for arm in _arms(points[0])).items():
        values = [(point.value, _arms(point)[arm][key]) for point in points]
        shown = sorted((position, factor * value) for position, value in values if value is not None)
        axes.plot([position for position, _ in shown], [value for _, value in shown], label=arm, **stroke.options)
    ticks = [float(point.value) for point in points]
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)


def _arms(point: SweepPoint) -> dict[str, Any]:
    return dict(point.findings("tiers")["arms"])

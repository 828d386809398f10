"""The figure of the analysis `tiers`: hits and TTFT side by side, over one swept number."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spanlab.report import style
from spanlab.report.sweep_data import SweepPoint, axis_name, footer_of

Curve = list[tuple[float, float | None]]


def draw_tiers(points: Sequence[SweepPoint]) -> Figure | None:
    """Token hit rate and mean TTFT of every arm; None where the axis is no number. A saturated point is left out."""
    if len(points) < 2 or not all(isinstance(point.value, float) for point in points):
        return None
    figure, [[hits, ttft]] = style.framed_with(
        footer_of(points), "Hits and TTFT by a tier below the device", cols=2, wspace=0.3
    )
    arms = list(points[0].summary["tiers"]["arms"]) if points[0].summary else []
    strokes = style.strokes((arm, arm) for arm in arms)
    for arm in arms:
        _line(hits, _curve(points, arm, "token_hit_rate", 100), arm, strokes[arm])
        _line(ttft, _curve(points, arm, "ttft_mean_s", 1000), arm, strokes[arm])
    axis = axis_name(points[0].axis)
    style.label(hits, axis, "token hit rate (%)")
    style.label(ttft, axis, "mean TTFT (ms)")
    hits.set_ylim(0, 100)
    for axes in (hits, ttft):
        axes.set_xscale("log")
    ttft.set_yscale("log")
    hits.legend(fontsize=style.TICK_PT, frameon=False)
    return figure


def _curve(points: Sequence[SweepPoint], arm: str, key: str, factor: float) -> Curve:
    values = [(float(point.value), (point.summary or {})["tiers"]["arms"][arm][key]) for point in points]
    return sorted((at, None if value is None else factor * value) for at, value in values)


def _line(axes: Axes, curve: Curve, arm: str, stroke: style.Stroke) -> None:
    shown = [(at, value) for at, value in curve if value is not None]
    if shown:
        xs, ys = zip(*shown, strict=True)
        axes.plot(xs, ys, color=stroke.colour, marker=stroke.marker, linestyle=stroke.line, label=arm)

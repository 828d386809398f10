"""Offered load against queueing delay."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spanlab.report import look, scales
from spanlab.report.data import LoadPoint, StudyData

_FLOOR = 1e-4  # of the largest delay: where the log axis ends at the latest
_CURVES = ("mean", "p99")  # a zero has no place on a log axis; the band may run out of its foot


def draw(study: StudyData) -> Figure | None:
    """Mean (95 % band over seeds) and p99 queueing delay by offered load, utilisation below."""
    if not study.load:
        return None
    arms = _curves(study.load)
    figure, [[mean, tail], [busy, key]] = look.framed(
        study,
        "Queueing delay by offered load",
        rows=2,
        cols=2,
        height=5.7,
        margins=look.Margins(top=0.66),
        share=("all", "none"),
        hspace=0.16,
        wspace=0.14,
        height_ratios=(2.4, 1),
    )
    unit = scales.time_unit(max(point.queue_s["p99"] or 0.0 for point in study.load))
    strokes = look.strokes((name, points[0].family) for name, points in arms.items())
    for name, points in arms.items():
        _draw_arm((mean, tail, busy), points, strokes[name], unit.factor)
    _scale([mean, tail], study.load, unit.factor)
    busy.set_ylim(0, 105)
    _finish(mean, tail, busy, unit.name)
    _draw_key(key, mean, len(arms))
    return figure


def _curves(load: list[LoadPoint]) -> dict[str, list[LoadPoint]]:
    arms: dict[str, list[LoadPoint]] = defaultdict(list)
    for point in sorted(load, key=lambda point: point.rate_rps):
        arms[point.arm].append(point)
    order = {name: k for k, name in enumerate(dict.fromkeys(point.arm for point in load))}
    return dict(sorted(arms.items(), key=lambda item: order[item[0]]))


def _draw_arm(axes: tuple[Axes, Axes, Axes], points: list[LoadPoint], stroke: look.Stroke, factor: float) -> None:
    mean, tail, busy = axes
    rate = [point.rate_rps for point in points]
    line = {
        "color": stroke.colour,
        "marker": stroke.marker,
        "markersize": 5,
        "linestyle": stroke.line,
        "linewidth": 1.3,
    }
    mean.plot(rate, _delays(points, "mean", factor), label=points[0].arm, **line)
    low, high = _delays(points, "low", factor), _delays(points, "high", factor)
    mean.fill_between(rate, low, high, color=stroke.colour, alpha=0.18, linewidth=0)
    tail.plot(rate, _delays(points, "p99", factor), **line)
    busy.plot(rate, [100 * point.utilisation for point in points], **line)


def _delays(points: list[LoadPoint], key: str, factor: float) -> np.ndarray:
    values = (point.queue_s.get(key) for point in points)
    means = (point.queue_s["mean"] for point in points)
    delays = factor * np.array([mean if value is None else value for value, mean in zip(values, means, strict=True)])
    return np.where(delays > 0, delays, np.nan) if key in _CURVES else delays


def _scale(axes: list[Axes], load: list[LoadPoint], factor: float) -> None:
    delays = [point.queue_s[key] or 0.0 for point in load for key in ("mean", "p99")]
    high = factor * max(delays) or 1.0
    low = max(factor * min((delay for delay in delays if delay > 0), default=high / 10), _FLOOR * high)
    for ax in axes:
        scales.log_scale(ax.yaxis, low, high)
        ax.set_ylim(low / 1.5, high * 1.5)


def _finish(mean: Axes, tail: Axes, busy: Axes, unit: str) -> None:
    mean.set_title("mean (zeros not drawn), band: 95 % interval", fontsize=look.TICK_PT, loc="left")
    tail.set_title("99th percentile", fontsize=look.TICK_PT, loc="left")
    look.label(mean, y=f"queueing delay ({unit})")
    tail.tick_params(labelleft=False, labelbottom=True)
    tail.set_xlabel("offered load (requests/s)", fontsize=look.LABEL_PT)
    look.label(busy, "offered load (requests/s)", "utilisation (%)")


def _draw_key(key: Axes, curves: Axes, arms: int) -> None:
    key.set_axis_off()
    handles, names = curves.get_legend_handles_labels()
    key.legend(
        handles,
        names,
        loc="lower left",
        fontsize=8.5,
        frameon=False,
        ncols=1 + (arms - 1) // 5,
        handlelength=3,
    )

"""One kind of delay by offered load: mean and tail side by side, utilisation below."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spanlab.report import look, scales
from spanlab.report.data import LoadPoint, StudyData

Delay = Callable[[LoadPoint], dict[str, float | None]]

_FLOOR = 1e-4  # of the largest delay: where the log axis ends at the latest
_CURVES = ("mean", "p99")  # a zero has no place on a log axis; the band may run out of its foot


def draw_load_curves(study: StudyData, delay: Delay, title: str, name: str) -> Figure | None:
    """Mean (95 % band over seeds) and p99 of one delay by offered load; `name` is what its axis says."""
    if not study.load:
        return None
    arms = _curves(study.load)
    figure, [[mean, tail], [busy, key]] = look.framed(
        study,
        title,
        rows=2,
        cols=2,
        height=5.7,
        margins=look.Margins(top=0.66),
        share=("all", "none"),
        hspace=0.16,
        wspace=0.14,
        height_ratios=(2.4, 1),
    )
    shown = [delay(point) for point in study.load]
    unit = scales.time_unit(max(values["p99"] or 0.0 for values in shown))
    strokes = look.strokes((arm, points[0].family) for arm, points in arms.items())
    for arm, points in arms.items():
        _draw_arm((mean, tail, busy), points, [delay(point) for point in points], strokes[arm], unit.factor)
    zeros = _scale([mean, tail], shown, unit.factor)
    busy.set_ylim(0, 105)
    _finish(mean, tail, busy, f"{name} ({unit.name})", zeros)
    _draw_key(key, mean, len(arms))
    return figure


def _curves(load: list[LoadPoint]) -> dict[str, list[LoadPoint]]:
    arms: dict[str, list[LoadPoint]] = defaultdict(list)
    for point in sorted(load, key=lambda point: point.rate_rps):
        arms[point.arm].append(point)
    order = {name: k for k, name in enumerate(dict.fromkeys(point.arm for point in load))}
    return dict(sorted(arms.items(), key=lambda item: order[item[0]]))


def _draw_arm(
    axes: tuple[Axes, Axes, Axes],
    points: Sequence[LoadPoint],
    delays: Sequence[dict[str, float | None]],
    stroke: look.Stroke,
    factor: float,
) -> None:
    mean, tail, busy = axes
    rate = [point.rate_rps for point in points]
    line = {
        "color": stroke.colour,
        "marker": stroke.marker,
        "markersize": 5,
        "linestyle": stroke.line,
        "linewidth": 1.3,
    }
    mean.plot(rate, _values(delays, "mean", factor), label=points[0].arm, **line)
    low, high = _values(delays, "low", factor), _values(delays, "high", factor)
    mean.fill_between(rate, low, high, color=stroke.colour, alpha=0.18, linewidth=0)
    tail.plot(rate, _values(delays, "p99", factor), **line)
    busy.plot(rate, [100 * point.utilisation for point in points], **line)


def _values(delays: Sequence[dict[str, float | None]], key: str, factor: float) -> np.ndarray:
    values = (delay.get(key) for delay in delays)
    means = (delay["mean"] for delay in delays)
    found = factor * np.array([mean if value is None else value for value, mean in zip(values, means, strict=True)])
    return np.where(found > 0, found, np.nan) if key in _CURVES else found


def _scale(axes: list[Axes], delays: Sequence[dict[str, float | None]], factor: float) -> bool:
    """Log axes for what is above zero; whether a zero is left out."""
    values = [delay[key] or 0.0 for delay in delays for key in _CURVES]
    high = factor * max(values) or 1.0
    low = max(factor * min((value for value in values if value > 0), default=high / 10), _FLOOR * high)
    for ax in axes:
        scales.log_scale(ax.yaxis, low, high)
        ax.set_ylim(low / 1.5, high * 1.5)
    return 0.0 in values


def _finish(mean: Axes, tail: Axes, busy: Axes, name: str, zeros: bool) -> None:
    left_out = " (zeros not drawn)" if zeros else ""
    mean.set_title(f"mean{left_out}, band: 95 % interval", fontsize=look.TICK_PT, loc="left")
    tail.set_title("99th percentile", fontsize=look.TICK_PT, loc="left")
    look.label(mean, y=name)
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

"""One kind of delay by offered load: mean and tail side by side, utilisation below.

Hollow grey markers are runs whose queue grows or whose warm-up does not end; no line connects them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from spanlab.report.data import LoadPoint, StudyData
from spanlab.report.drawing import scales, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Delay = Callable[[LoadPoint], dict[str, float | None]]

_FLOOR = 1e-4  # lowest end of the log axis, as a share of the largest delay
_CURVES = ("mean", "p99", "unstable")  # their zeros cannot be shown on a log axis
_GREY = "#8a8a8a"


def draw_load_curves(study: StudyData, delay: Delay, title: str, name: str) -> Figure | None:
    """Draw mean, with its 95 % band if any, and p99 of one delay by offered load; `name` labels the axis."""
    if not study.load:
        return None
    arms = _curves(study.load)
    figure, [[mean, tail], [busy, key]] = style.framed_with(
        study.provenance,
        title,
        rows=2,
        cols=2,
        height=5.7,
        margins=style.Margins(top=0.66),
        share=("all", "none"),
        hspace=0.16,
        wspace=0.14,
        height_ratios=(2.4, 1),
    )
    shown = [delay(point) for point in study.load]
    unit = scales.time_unit(max(value or 0.0 for values in shown for value in values.values()))
    strokes = style.strokes((arm, points[0].family) for arm, points in arms.items())
    for arm, points in arms.items():
        _draw_arm((mean, tail, busy), points, [delay(point) for point in points], strokes[arm], unit.factor)
    zeros = _scale([mean, tail], shown, unit.factor)
    _finish_utilisation(busy, study.load)
    _finish(mean, tail, f"{name} ({unit.name})", _notes(study.load, zeros))
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
    stroke: style.Stroke,
    factor: float,
) -> None:
    mean, tail, busy = axes
    rate = [point.rate_rps for point in points]
    line = {"markersize": 5, "linewidth": 1.3, **stroke.options}
    stable = [point.stable for point in points]
    means = _values(delays, "mean", factor)
    mean.plot(rate, np.where(stable, means, np.nan), label=points[0].arm, **line)
    low, high = _values(delays, "low", factor), _values(delays, "high", factor)
    mean.fill_between(rate, low, high, where=stable, color=stroke.colour, alpha=0.18, linewidth=0)
    tails = _values(delays, "p99", factor)
    tail.plot(rate, np.where(stable, tails, np.nan), **line)
    unstable = np.where(np.isnan(means), _values(delays, "unstable", factor), means)
    for ax, values in ((mean, unstable), (tail, tails)):
        _draw_unstable(ax, rate, np.where(stable, np.nan, values), stroke)
    busy.plot(rate, [_percent(point.utilisation) for point in points], **line)


def _draw_unstable(ax: Axes, rate: Sequence[float], values: np.ndarray, stroke: style.Stroke) -> None:
    present = ~np.isnan(values)
    if present.any():
        ax.plot(
            np.asarray(rate)[present],
            values[present],
            stroke.marker,
            linestyle="none",
            markerfacecolor="none",
            markeredgecolor=_GREY,
            markersize=7,
            gid="unstable",
        )


def _percent(value: float | None) -> float:
    return float("nan") if value is None else 100 * value


def _values(delays: Sequence[dict[str, float | None]], key: str, factor: float) -> np.ndarray:
    """Return one value of each delay: NaN where it is missing or not positive, as a log axis requires."""
    scaled = factor * np.array([delay.get(key) or np.nan for delay in delays], dtype=np.float64)
    return np.where(scaled > 0, scaled, np.nan)


def _scale(axes: list[Axes], delays: Sequence[dict[str, float | None]], factor: float) -> bool:
    """Set log axes for the positive values; return whether a zero is omitted."""
    values = [value for delay in delays for key in _CURVES if (value := delay.get(key)) is not None]
    high = factor * max(values, default=0.0) or 1.0
    low = max(factor * min((value for value in values if value > 0), default=high / 10), _FLOOR * high)
    for ax in axes:
        scales.log_scale(ax.yaxis, low, high)
        ax.set_ylim(low / 1.5, high * 1.5)
    return 0.0 in values


def _notes(load: Sequence[LoadPoint], zeros: bool) -> str:
    """Describe what the panel of means omits and marks."""
    notes = ["zeros not drawn"] * zeros
    banded = any(point.ttft_s["low"] is not None for point in load)
    notes.append("band: 95 % interval" if banded else "no band: under 5 seeds")
    notes += ["hollow: no steady state"] * (not all(point.stable for point in load))
    return "; ".join(notes)


def _finish(mean: Axes, tail: Axes, name: str, notes: str) -> None:
    mean.set_title(f"mean ({notes})", fontsize=style.TICK_PT, loc="left")
    tail.set_title("99th percentile", fontsize=style.TICK_PT, loc="left")
    style.label(mean, y=name)
    tail.tick_params(labelleft=False, labelbottom=True)
    tail.set_xlabel("offered load (requests/s)", fontsize=style.LABEL_PT)


def _finish_utilisation(ax: Axes, load: Sequence[LoadPoint]) -> None:
    shares = [_percent(point.utilisation) for point in load]
    ax.set_ylim(0, 1.05 * max(100.0, *(share for share in shares if share == share), 0.0))
    ax.axhline(100, color=style.INK, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
    if all(share != share for share in shares):
        ax.text(0.5, 0.5, "unknown on the engine", transform=ax.transAxes, ha="center", va="center", fontsize=8)
    style.label(ax, "offered load (requests/s)", "utilisation (%)")


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

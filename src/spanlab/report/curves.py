"""Figures of trade-offs and of load: Pareto fronts, queueing and TTFT by rate of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from spanlab.report import style
from spanlab.report.data import (
    LoadPoint,
    StudyData,
    bounds_percent,
    bytes_say_little,
    evicts,
    holds_states,
    is_full_recompute,
    mean_ttft,
    resident_bytes,
    resident_half_width,
    saved_half_width_percent,
    saved_percent,
)
from spanlab.report.figures import (
    FIGURES,
    draw_cache_content,
    draw_checkpoint_positions,
    draw_common_prefix,
    draw_length_ttft,
    draw_loss_by_cause,
    draw_ttft_distribution,
    reference,
)
from spanlab.report.style import (
    FAMILY_STYLES,
    INK,
    Label,
    Unit,
    byte_unit,
    family_style,
    log_scale,
    place_labels,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# ------------------------------------------------------------------------------
# One kind of delay by offered load: mean and tail side by side, utilisation below.
#
# Hollow grey markers are runs whose queue grows or whose warm-up does not end; no line connects
# them.
# ------------------------------------------------------------------------------

Delay = Callable[[LoadPoint], dict[str, float | None]]

_FLOOR = 1e-4  # lowest end of the log axis, as a share of the largest delay
_CURVES = ("mean", "p99", "unstable")  # their zeros cannot be shown on a log axis
_GREY = "#8a8a8a"


def draw_load_curves(study: StudyData, delay: Delay, title: str, name: str) -> Figure | None:
    """Draw mean, with its 95 % band if any, and p99 of one delay by offered load; `name` labels the
    axis."""
    if not study.load:
        return None
    arms: dict[str, list[LoadPoint]] = {point.arm: [] for point in study.load}
    for point in sorted(study.load, key=lambda point: point.rate_rps):
        arms[point.arm].append(point)
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
    unit = style.time_unit(max(value or 0.0 for values in shown for value in values.values()))
    strokes = style.strokes((arm, points[0].family) for arm, points in arms.items())
    for arm, points in arms.items():
        _draw_arm(
            (mean, tail, busy),
            points,
            [delay(point) for point in points],
            strokes[arm],
            unit.factor,
        )
    # log axes for the positive values
    values = [value for entry in shown for key in _CURVES if (value := entry.get(key)) is not None]
    high = unit.factor * max(values, default=0.0) or 1.0
    low = max(
        unit.factor * min((value for value in values if value > 0), default=high / 10),
        _FLOOR * high,
    )
    for ax in (mean, tail):
        style.log_scale(ax.yaxis, low, high)
        ax.set_ylim(low / 1.5, high * 1.5)
    _finish_utilisation(busy, study.load)
    # what the panel of means omits and marks
    notes = ["zeros not drawn"] * (0.0 in values)
    banded = any(point.ttft_s["low"] is not None for point in study.load)
    notes.append("band: 95 % interval" if banded else "no band: under 5 seeds")
    notes += ["hollow: no steady state"] * (not all(point.stable for point in study.load))
    mean.set_title(f"mean ({'; '.join(notes)})", fontsize=style.TICK_PT, loc="left")
    tail.set_title("99th percentile", fontsize=style.TICK_PT, loc="left")
    style.label(mean, y=f"{name} ({unit.name})")
    tail.tick_params(labelleft=False, labelbottom=True)
    tail.set_xlabel("offered load (requests/s)", fontsize=style.LABEL_PT)
    # the key of all panels
    key.set_axis_off()
    handles, names = mean.get_legend_handles_labels()
    look: dict[str, Any] = {"fontsize": 8.5, "frameon": False, "handlelength": 3}
    key.legend(handles, names, loc="lower left", ncols=1 + (len(arms) - 1) // 5, **look)
    return figure


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
        present = ~np.isnan(np.where(stable, np.nan, values))
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
    busy.plot(rate, [_percent(point.utilisation) for point in points], **line)


def _percent(value: float | None) -> float:
    return float("nan") if value is None else 100 * value


def _values(delays: Sequence[dict[str, float | None]], key: str, factor: float) -> np.ndarray:
    """Return one value of each delay: NaN where it is missing or not positive, as a log axis
    requires."""
    scaled = factor * np.array([delay.get(key) or np.nan for delay in delays], dtype=np.float64)
    return np.where(scaled > 0, scaled, np.nan)


def _finish_utilisation(ax: Axes, load: Sequence[LoadPoint]) -> None:
    shares = [_percent(point.utilisation) for point in load]
    ax.set_ylim(0, 1.05 * max(100.0, *(share for share in shares if share == share), 0.0))
    ax.axhline(100, color=style.INK, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
    if all(share != share for share in shares):
        ax.text(
            0.5,
            0.5,
            "unknown on the engine",
            transform=ax.transAxes,
            ha="center",
            va="center",
            fontsize=8,
        )
    style.label(ax, "offered load (requests/s)", "utilisation (%)")


# ------------------------------------------------------------------------------
# Offered load against queueing delay.
# ------------------------------------------------------------------------------


def draw_queueing_load(study: StudyData) -> Figure | None:
    """Mean and p99 of the queueing delay by offered load, utilisation below."""
    return draw_load_curves(
        study, lambda point: point.queue_s, "Queueing delay by offered load", "queueing delay"
    )


# ------------------------------------------------------------------------------
# Offered load against the time to first token.
# ------------------------------------------------------------------------------


def draw_ttft_load(study: StudyData) -> Figure | None:
    """Mean and p99 of the time to first token by offered load, utilisation below."""
    return draw_load_curves(
        study, lambda point: point.ttft_s, "Time to first token by offered load", "TTFT"
    )


# ------------------------------------------------------------------------------
# Shared code of both Pareto figures: points of arms over resident bytes, one line per family,
# the frontier.
# ------------------------------------------------------------------------------

HEIGHT_IN = 5.8
_LOG_FROM = 12.0  # ratio of bytes above which the axis is logarithmic
_VISIBLE = 0.006  # share of the largest value: the marker covers a shorter error bar


@dataclass(frozen=True)
class Point:
    """One arm: its position and the lengths of its 95 % interval (below, above)."""

    name: str
    family: str
    x: float
    y: float
    x_half: float
    y_error: tuple[float, float]
    saves: bool  # the arm reuses tokens; other arms are not on the frontier
    full: bool = False  # its bytes are the budget, so it is not on the frontier


def resident_unit(study: StudyData) -> Unit:
    """Return the unit of the axis of resident bytes."""
    return byte_unit(max((resident_bytes(arm) for arm in study.arms), default=0.0))


def resident_label(study: StudyData) -> str:
    """Return the label of the axis of resident bytes."""
    content = "KV + states" if any(map(holds_states, study.arms)) else "KV"
    return f"resident bytes, {content}, mean over time ({resident_unit(study).name})"


def draw_points(ax: Axes, points: Sequence[Point], *, larger_is_better: bool) -> list[Point]:
    """Draw frontier, families and error bars, set the limits of x, and return the points drawn.

    Arms without bytes are listed beside the axes instead: a log axis cannot show them, and on a
    linear axis they would compress all others.
    """
    shown = [point for point in points if point.x > 0] or list(points)
    low, high = min(point.x for point in shown), max(point.x for point in shown)
    if low > 0 and high > _LOG_FROM * low:
        log_scale(ax.xaxis, low, high)
        ax.set_xlim(low / (high / low) ** 0.06, high * (high / low) ** 0.06)
    else:
        pad = 0.06 * (high - low) or 0.1 * high or 0.5
        ax.set_xlim(low - pad, high + 1.5 * pad)
    if edge := frontier(shown, larger_is_better=larger_is_better):
        line: dict[str, Any] = {"color": "#f2e9b8", "linewidth": 5, "solid_capstyle": "round"}
        # to the right edge: bytes beyond those of the last point bring no gain
        ax.plot(
            [*(point.x for point in edge), ax.get_xlim()[1]],
            [*(point.y for point in edge), edge[-1].y],
            drawstyle="steps-post",
            label="Pareto frontier",
            gid="frontier",
            zorder=1,
            **line,
        )
    for family, members in _families(shown):
        _draw_family(ax, family, members)
    # draw hollow markers where the store was full, with an entry in the legend
    full = [point for point in shown if point.full]
    hollow: dict[str, Any] = {
        "linestyle": "none",
        "markerfacecolor": "white",
        "markersize": 6,
        "zorder": 4,
    }
    for point in full:
        colour, marker = family_style(point.family)
        ax.plot([point.x], [point.y], marker, color=colour, gid="full", **hollow)
    if full:
        ax.plot([], [], "o", color=INK, label="hollow: store full", **hollow)
    hidden = [f"{point.name} (0 bytes)" for point in points if point not in shown]
    if hidden:
        ax.text(
            1.02,
            0,
            "\n".join(["not drawn:", *hidden]),
            transform=ax.transAxes,
            fontsize=8,
            color="#555555",
        )
    return shown


def draw_labels(ax: Axes, points: Sequence[Point], levels: Iterable[float]) -> None:
    """Label the points drawn; call it when all limits are set. `levels` are the heights of lines
    across the axes."""
    labels = [
        Label(point.x, point.y, point.name, family_style(point.family)[0]) for point in points
    ]
    lines = [[(point.x, point.y) for point in members] for _, members in _families(points)]
    across = [[(x, level) for x in ax.get_xlim()] for level in levels]
    bars = []
    for point in points:
        start = max(point.x - point.x_half, 0.5 * point.x)  # a log axis cannot show 0
        below, above = point.y - point.y_error[0], point.y + point.y_error[1]
        bars.append([(start, point.y), (point.x + point.x_half, point.y)])
        bars.append([(point.x, max(below, 0.5 * point.y)), (point.x, above)])
    place_labels(ax, labels, [*lines, *across, *bars])


def frontier(points: Sequence[Point], *, larger_is_better: bool) -> list[Point]:
    """Return the points with reuse that no other point beats in both bytes and y, by increasing
    bytes."""
    sign = -1.0 if larger_is_better else 1.0
    best = np.inf
    edge = []
    for point in sorted(points, key=lambda point: (point.x, sign * point.y)):
        if point.saves and not point.full and sign * point.y < best:
            best = sign * point.y
            edge.append(point)
    return edge


def _families(points: Sequence[Point]) -> list[tuple[str, list[Point]]]:
    ranks = {family: k for k, family in enumerate(FAMILY_STYLES)}
    ordered = sorted(points, key=lambda point: (ranks.get(point.family, len(ranks)), point.family))
    return [
        (family, list(members))
        for family, members in groupby(ordered, key=lambda point: point.family)
    ]


def _draw_family(ax: Axes, family: str, members: Sequence[Point]) -> None:
    colour, marker = family_style(family)
    x, y = [point.x for point in members], [point.y for point in members]
    ax.plot(
        x,
        y,
        color=colour,
        marker=marker,
        markersize=6,
        linewidth=1,
        label=family,
        gid=f"family:{family}",
        zorder=3,
    )
    y_error = np.array([point.y_error for point in members]).T
    x_half = np.array([point.x_half for point in members])
    bars: dict[str, Any] = {
        "fmt": "none",
        "ecolor": colour,
        "elinewidth": 1,
        "alpha": 0.55,
        "zorder": 2,
    }
    if (y_error > _VISIBLE * max(y)).any():
        ax.errorbar(x, y, yerr=y_error, **bars)
    if (x_half > _VISIBLE * max(x)).any():
        ax.errorbar(x, y, xerr=x_half, **bars)


# ------------------------------------------------------------------------------
# Resident bytes against reused tokens.
# ------------------------------------------------------------------------------

_BOUND = "infinite cache"


def draw_pareto_tokens(study: StudyData) -> Figure | None:
    """Draw reused tokens over resident bytes: a point per arm, a line per family, and the
    infinite-cache bounds."""
    if not study.arms or bytes_say_little(study.arms):
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
    points = []
    for arm in study.arms:
        half = saved_half_width_percent(arm.summary)
        points.append(
            Point(
                arm.name,
                arm.family,
                resident_bytes(arm) * unit.factor,
                saved_percent(arm),
                resident_half_width(arm) * unit.factor,
                (half, half),
                saves=bool(arm.summary["tokens"]["reused"]),
                full=evicts(arm),
            )
        )
    shown = draw_points(ax, points, larger_is_better=True)
    bounds = bounds_percent(arm.summary for arm in study.arms)
    for finds, percent in bounds.items():
        label = _BOUND if len(bounds) == 1 else f"{_BOUND}:\n{finds}"
        ax.axhline(
            percent, color=style.INK, linewidth=1, linestyle=style.BOUND_LINES[finds], label=label
        )
    top = max([*bounds.values(), *(point.y for point in points)])
    ax.set_ylim(-0.04 * (top or 1), 1.08 * (top or 1))
    style.label(ax, resident_label(study), "reused tokens (% of prompt tokens)")
    draw_labels(ax, shown, bounds.values())
    style.legend_right(ax)
    return figure


# ------------------------------------------------------------------------------
# Resident bytes against mean time to first token.
# ------------------------------------------------------------------------------


def draw_pareto_ttft(study: StudyData) -> Figure | None:
    """Draw mean TTFT with its 95 % interval over resident bytes, and full recompute as a line."""
    measured = [arm for arm in study.arms if arm.summary["ttft_s"]["mean"] is not None]
    unit = style.time_unit(max((arm.summary["ttft_s"]["mean"] for arm in measured), default=0.0))
    byte_unit = resident_unit(study)
    points = []
    for arm in (arm for arm in measured if not is_full_recompute(arm)):
        ttft = mean_ttft(arm.summary)
        mean, (low, high) = ttft.mean, ttft.ends or (ttft.mean, ttft.mean)
        points.append(
            Point(
                arm.name,
                arm.family,
                resident_bytes(arm) * byte_unit.factor,
                mean * unit.factor,
                resident_half_width(arm) * byte_unit.factor,
                (unit.factor * max(mean - low, 0.0), unit.factor * max(high - mean, 0.0)),
                saves=bool(arm.summary["tokens"]["reused"]),
                full=evicts(arm),
            )
        )
    if not points or bytes_say_little(study.arms):
        return None
    figure, [[ax]] = style.framed_with(
        study.provenance,
        f"Time to first token by resident bytes · store: {study.store}",
        height=HEIGHT_IN,
        margins=style.margins_for(
            (*(arm.family for arm in study.arms), "Pareto frontier", "hollow: store full")
        ),
    )
    none = reference(measured)
    level = none.summary["ttft_s"]["mean"] * unit.factor if none else None
    if none and level is not None:
        ax.axhline(
            level,
            color=style.family_style("none")[0],
            linewidth=1,
            linestyle=(0, (4, 2)),
            label=none.name,
        )
    shown = draw_points(ax, points, larger_is_better=False)
    lines = [] if level is None else [level]
    heights = [point.y for point in points] + lines
    low, high = min(heights), max(heights)
    if low > 0 and high > _LOG_FROM * low:
        style.log_scale(ax.yaxis, low, high)
        ax.set_ylim(low / 1.4, high * 1.4)
    else:
        ax.set_ylim(0, 1.1 * high or 1)
    style.label(ax, resident_label(study), f"mean TTFT ({unit.name})")
    draw_labels(ax, shown, lines)
    style.legend_right(ax)
    return figure


# In the order of a report.
FIGURES.register("pareto_tokens")(draw_pareto_tokens)
FIGURES.register("pareto_ttft")(draw_pareto_ttft)
FIGURES.register("length_ttft")(draw_length_ttft)
FIGURES.register("common_prefix")(draw_common_prefix)
FIGURES.register("checkpoint_positions")(draw_checkpoint_positions)
FIGURES.register("loss_by_cause")(draw_loss_by_cause)
FIGURES.register("cache_content")(draw_cache_content)
FIGURES.register("queueing_load")(draw_queueing_load)
FIGURES.register("ttft_load")(draw_ttft_load)
FIGURES.register("ttft_distribution")(draw_ttft_distribution)

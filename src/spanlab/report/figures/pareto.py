"""Shared code of both Pareto figures: points of arms over resident bytes, one line per family, the frontier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from spanlab.report import measures
from spanlab.report.data import StudyData
from spanlab.report.drawing.labels import Label, place_labels
from spanlab.report.drawing.scales import Unit, byte_unit, log_scale
from spanlab.report.drawing.style import FAMILY_STYLES, INK, family_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    return byte_unit(max((measures.resident_bytes(arm) for arm in study.arms), default=0.0))


def resident_label(study: StudyData) -> str:
    """Return the label of the axis of resident bytes."""
    content = "KV + states" if any(map(measures.holds_states, study.arms)) else "KV"
    return f"resident bytes, {content}, mean over time ({resident_unit(study).name})"


def draw_points(ax: Axes, points: Sequence[Point], *, larger_is_better: bool) -> list[Point]:
    """Draw frontier, families and error bars, set the limits of x, and return the points drawn.

    Arms without bytes are listed beside the axes instead: a log axis cannot show them, and on a linear axis they
    would compress all others.
    """
    shown = [point for point in points if point.x > 0] or list(points)
    _scale_x(ax, [point.x for point in shown])
    _draw_frontier(ax, shown, larger_is_better)
    for family, members in _families(shown):
        _draw_family(ax, family, members)
    _draw_full(ax, shown)
    hidden = [f"{point.name} (0 bytes)" for point in points if point not in shown]
    if hidden:
        ax.text(1.02, 0, "\n".join(["not drawn:", *hidden]), transform=ax.transAxes, fontsize=8, color="#555555")
    return shown


def draw_labels(ax: Axes, points: Sequence[Point], levels: Iterable[float]) -> None:
    """Label the points drawn; call it when all limits are set. `levels` are the heights of lines across the axes."""
    labels = [Label(point.x, point.y, point.name, family_style(point.family)[0]) for point in points]
    lines = [[(point.x, point.y) for point in members] for _, members in _families(points)]
    across = [[(x, level) for x in ax.get_xlim()] for level in levels]
    place_labels(ax, labels, [*lines, *across, *(bar for point in points for bar in _bars(point))])


def frontier(points: Sequence[Point], *, larger_is_better: bool) -> list[Point]:
    """Return the points with reuse that no other point beats in both bytes and y, by increasing bytes."""
    sign = -1.0 if larger_is_better else 1.0
    best = np.inf
    edge = []
    for point in sorted(points, key=lambda point: (point.x, sign * point.y)):
        if point.saves and not point.full and sign * point.y < best:
            best = sign * point.y
            edge.append(point)
    return edge


def _scale_x(ax: Axes, x: Sequence[float]) -> None:
    low, high = min(x), max(x)
    if low > 0 and high > _LOG_FROM * low:
        log_scale(ax.xaxis, low, high)
        ax.set_xlim(low / (high / low) ** 0.06, high * (high / low) ** 0.06)
    else:
        pad = 0.06 * (high - low) or 0.1 * high or 0.5
        ax.set_xlim(low - pad, high + 1.5 * pad)


def _families(points: Sequence[Point]) -> list[tuple[str, list[Point]]]:
    ranks = {family: k for k, family in enumerate(FAMILY_STYLES)}
    ordered = sorted(points, key=lambda point: (ranks.get(point.family, len(ranks)), point.family))
    return [(family, list(members)) for family, members in groupby(ordered, key=lambda point: point.family)]


def _bars(point: Point) -> list[list[tuple[float, float]]]:
    start = max(point.x - point.x_half, 0.5 * point.x)  # a log axis cannot show 0
    below, above = point.y - point.y_error[0], point.y + point.y_error[1]
    across = [(start, point.y), (point.x + point.x_half, point.y)]
    return [across, [(point.x, max(below, 0.5 * point.y)), (point.x, above)]]


def _draw_frontier(ax: Axes, points: Sequence[Point], larger_is_better: bool) -> None:
    edge = frontier(points, larger_is_better=larger_is_better)
    if not edge:
        return
    x, y = [point.x for point in edge], [point.y for point in edge]
    line: dict[str, Any] = {
        "color": "#f2e9b8",
        "linewidth": 5,
        "zorder": 1,
        "solid_capstyle": "round",
        "gid": "frontier",
    }
    # to the right edge: bytes beyond those of the last point bring no gain
    ax.plot([*x, ax.get_xlim()[1]], [*y, y[-1]], drawstyle="steps-post", label="Pareto frontier", **line)


def _draw_full(ax: Axes, points: Sequence[Point]) -> None:
    """Draw hollow markers where the store was full, with an entry in the legend."""
    full = [point for point in points if point.full]
    hollow: dict[str, Any] = {"linestyle": "none", "markerfacecolor": "white", "markersize": 6, "zorder": 4}
    for point in full:
        colour, marker = family_style(point.family)
        ax.plot([point.x], [point.y], marker, color=colour, gid="full", **hollow)
    if full:
        ax.plot([], [], "o", color=INK, label="hollow: store full", **hollow)


def _draw_family(ax: Axes, family: str, members: Sequence[Point]) -> None:
    colour, marker = family_style(family)
    x, y = [point.x for point in members], [point.y for point in members]
    ax.plot(
        x, y, color=colour, marker=marker, markersize=6, linewidth=1, label=family, gid=f"family:{family}", zorder=3
    )
    y_error = np.array([point.y_error for point in members]).T
    x_half = np.array([point.x_half for point in members])
    bars: dict[str, Any] = {"fmt": "none", "ecolor": colour, "elinewidth": 1, "alpha": 0.55, "zorder": 2}
    if (y_error > _VISIBLE * max(y)).any():
        ax.errorbar(x, y, yerr=y_error, **bars)
    if (x_half > _VISIBLE * max(x)).any():
        ax.errorbar(x, y, xerr=x_half, **bars)

"""One panel of a sweep: lines over numbers, dots over categories, names of arms beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spanlab.report.drawing import scales, style
from spanlab.report.sweep.data import SweepRow, Value, axis_name, value_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis, XAxis, YAxis

_LOG_FROM = 6.0
_LABEL_PT = 7.5
_LABEL_IN = 0.13  # height of a label
_NAMES_IN = 1.1  # width that the names of arms take beside a panel
_NAMES_X = 1.05  # position of the names, in widths of the panel
_OVERHANG = 0.06  # share of the panel's height by which names may exceed it above and below
_CATEGORY_STEP = 0.24  # share of the distance between two arms
_CATEGORY_MARKS = ("o", "D", "s", "^", "v")


@dataclass(frozen=True)
class Measure:
    """The measure of a panel: a field of the rows, the name with unit, the factor to that unit."""

    field: str
    name: str
    factor: float

    @property
    def title(self) -> str:
        """The name without its unit, capitalised for a title."""
        name = self.name.partition(" (")[0]
        return name[0].upper() + name[1:]

    def of(self, row: SweepRow) -> float:
        """Return the value of a row in the unit of the axis."""
        return float(self.factor * getattr(row, self.field))

    def reach(self, rows: Sequence[SweepRow]) -> list[list[float]]:
        """Return lengths of the 95 % intervals below and above the values, shape (2, rows); 0 without an interval."""
        return [[self._length(row, "low") for row in rows], [self._length(row, "high") for row in rows]]

    def _length(self, row: SweepRow, side: str) -> float:
        end = getattr(row, f"{self.field}_{side}")
        return 0.0 if end is None else abs(self.factor * end - self.of(row))


HIT_RATE = Measure("token_hit_rate", "token hit rate (%)", 100.0)


class _End(NamedTuple):
    """The right end of a line."""

    name: str
    x: float
    y: float
    colour: str


class _Category(NamedTuple):
    """A categorical value: its number, and the offset of its marks above the line of an arm."""

    text: str
    number: int
    above: float


class Panel:
    """The axes of one swept setting and the rows to draw; `strokes` by arm."""

    def __init__(
        self, ax: Axes, rows: Sequence[SweepRow], strokes: Mapping[str, style.Stroke], measure: Measure
    ) -> None:
        self._ax, self._strokes, self._measure = ax, strokes, measure
        self._arms: dict[str, list[SweepRow]] = {}
        for row in rows:
            self._arms.setdefault(row.arm, []).append(row)

    def draw(self, key: str, values: Sequence[Value]) -> None:
        """Draw every arm at every value of the setting `key`."""
        if any(isinstance(value, str) for value in values):
            self._draw_categories([value_text(value) for value in values])
        else:
            self._draw_numbers(key, sorted(map(float, values)))

    def _draw_numbers(self, key: str, values: Sequence[float]) -> None:
        ends = [self._draw_line(arm, rows) for arm, rows in self._arms.items()]
        if self._measure is HIT_RATE:
            ends += self._draw_bounds()
        _log_where_wide(self._ax.xaxis, values)
        self._ax.set_xticks(values, [value_text(value) for value in values])
        self._set_limits(self._ax.yaxis)
        style.label(self._ax, axis_name(key), self._measure.name, size=9)
        self._name_ends(ends)

    def _draw_line(self, arm: str, rows: Sequence[SweepRow]) -> _End:
        stroke, ordered = self._strokes[arm], sorted(rows, key=lambda row: row.value)
        x, y = [float(row.value) for row in ordered], [self._measure.of(row) for row in ordered]
        options = {"color": stroke.colour, "linestyle": stroke.line, "linewidth": 1.2}
        self._ax.plot(x, y, marker=stroke.marker, markersize=4.5, label=arm, clip_on=False, **options)
        reach = self._measure.reach(ordered)
        if np.any(reach):
            self._ax.errorbar(x, y, yerr=reach, fmt="none", ecolor=stroke.colour, elinewidth=0.8, capsize=1.5)
        return _End(arm, x[-1], y[-1], stroke.colour)

    def _draw_bounds(self) -> list[_End]:
        """Draw the reuse of an infinite cache, by the kind of lookup."""
        return [self._draw_bound(finds, levels) for finds, levels in self._bounds().items()]

    def _bounds(self) -> dict[str, dict[float, float]]:
        """Return the largest bound over arms by value, as requests in flight at a lookup differ by arm."""
        bounds: dict[str, dict[float, float]] = {}
        for row in (row for rows in self._arms.values() for row in rows):
            levels = bounds.setdefault(row.finds, {})
            value = float(row.value)
            levels[value] = max(100 * row.bound, levels.get(value, 0.0))
        return bounds

    def _draw_bound(self, finds: str, levels: Mapping[float, float]) -> _End:
        x, name = sorted(levels), f"infinite cache:\n{finds}"
        y = [levels[value] for value in x]
        self._ax.plot(x, y, color=style.INK, linewidth=1, linestyle=style.BOUND_LINES[finds], label=name)
        return _End(name, x[-1], y[-1], style.INK)

    def _name_ends(self, ends: Sequence[_End]) -> None:
        """Write names beside the right ends of the lines, without overlaps."""
        to_axes = self._ax.transData + self._ax.transAxes.inverted()
        heights = to_axes.transform([(end.x, end.y) for end in ends])[:, 1]
        lines = np.array([1 + end.name.count("\n") for end in ends])
        label_heights = spread(heights, lines * _LABEL_IN / self._size_in(1))
        for end, height, label_height in zip(ends, heights, label_heights, strict=True):
            self._name_end(end, float(height), float(label_height))

    def _name_end(self, end: _End, height: float, label_height: float) -> None:
        leader = {"arrowstyle": "-", "color": end.colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2}
        self._ax.annotate(
            end.name,
            (1.0, height),
            (_NAMES_X, label_height),
            xycoords="axes fraction",
            fontsize=_LABEL_PT,
            color=end.colour,
            va="center",
            annotation_clip=False,
            arrowprops={**leader, "relpos": (0, 0.5)},
        )

    def _size_in(self, side: int) -> float:
        """Return the width (0) or height (1) of the panel in inches."""
        figure = self._ax.get_figure(root=True)
        assert figure is not None, "a panel is part of a figure"
        return float(self._ax.get_position().size[side] * figure.get_size_inches()[side])

    def _draw_categories(self, texts: Sequence[str]) -> None:
        """Draw one row per arm and one mark per category; the arm with the best first category is on top."""
        order = sorted(self._arms, key=lambda arm: self._measure.of(self._arms[arm][0]))
        for rank, arm in enumerate(order):
            reach = [self._measure.of(row) for row in self._arms[arm]]
            self._ax.hlines(rank, min(reach), max(reach), color=self._strokes[arm].colour, linewidth=1)
        for index, text in enumerate(texts):
            self._draw_category(_Category(text, index, _CATEGORY_STEP * ((len(texts) - 1) / 2 - index)), order)
        self._ax.set_yticks(range(len(order)), order, fontsize=_LABEL_PT)
        self._ax.yaxis.tick_right()
        self._ax.tick_params(axis="y", length=0)
        self._set_limits(self._ax.xaxis)
        style.label(self._ax, self._measure.name, size=9)
        right = 1 + _NAMES_IN / self._size_in(0)
        legend = self._ax.legend(
            loc="lower right",
            bbox_to_anchor=(right, 0.985),
            ncols=len(texts),
            fontsize=_LABEL_PT,
            frameon=False,
            handletextpad=0.1,
            columnspacing=0.8,
        )
        for index, handle in enumerate(legend.legend_handles):
            handle.set(edgecolor=style.INK, facecolor="white" if index else style.INK)  # type: ignore[union-attr]

    def _draw_category(self, category: _Category, order: Sequence[str]) -> None:
        rows = {row.arm: row for row in self._all() if value_text(row.value) == category.text}
        shown = [(rank, rows[arm]) for rank, arm in enumerate(order) if arm in rows]
        colours = [self._strokes[row.arm].colour for _, row in shown]
        x, y = [self._measure.of(row) for _, row in shown], [rank + category.above for rank, _ in shown]
        reach = self._measure.reach([row for _, row in shown])
        self._ax.errorbar(x, y, xerr=reach, fmt="none", ecolor=style.INK, elinewidth=0.7)
        self._ax.scatter(
            x,
            y,
            s=20,
            marker=_CATEGORY_MARKS[category.number % len(_CATEGORY_MARKS)],
            facecolors="white" if category.number else colours,
            edgecolors=colours,
            linewidths=1.1,
            clip_on=False,
            label=category.text,
            zorder=3,
        )

    def _all(self) -> list[SweepRow]:
        return [row for rows in self._arms.values() for row in rows]

    def _set_limits(self, axis: XAxis | YAxis) -> None:
        """Set limits: rates from 0 to 100, times from zero, or logarithmic over a wide range."""
        values = [self._measure.of(row) for row in self._all()]
        low, high = 0.0, 1.1 * max(values)
        if self._measure is HIT_RATE:
            high = 100.0
        elif _log_where_wide(axis, values):
            low, high = min(values) / 1.3, 1.3 * max(values)
        axis.axes.set(**{f"{axis.axis_name}lim": (low, high or 1.0)})


def _log_where_wide(axis: Axis, values: Sequence[float]) -> bool:
    """Set a log axis where positive values span a wide range; return whether it is set."""
    wide = min(values) > 0 and max(values) > _LOG_FROM * min(values)
    if wide:
        scales.log_scale(axis, min(values), max(values))
    return wide


def spread(centres: NDArray[np.float64], sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return centres of labels of these sizes, close to the given centres and in their order, without overlaps.

    All are shares of a panel's height; labels may exceed the panel by `_OVERHANG` above and below.
    """
    order = np.argsort(centres, kind="stable")
    sizes = sizes[order] * min(1.0, (1 + 2 * _OVERHANG) / sizes.sum())
    apart = np.concatenate([[0.0], np.cumsum((sizes[1:] + sizes[:-1]) / 2)])
    # ordered least squares: isotonic regression of the centres minus the distances between labels
    free = np.clip(_isotonic(centres[order] - apart), -_OVERHANG, 1 + _OVERHANG - apart[-1])
    spread_centres = np.empty_like(free)
    spread_centres[order] = free + apart
    return spread_centres


def _isotonic(values: NDArray[np.float64]) -> NDArray[np.float64]:
    from scipy.optimize import isotonic_regression

    return np.asarray(isotonic_regression(values).x)

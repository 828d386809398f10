"""Table and figure of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spanlab.report import style
from spanlab.report.data import mean_ttft, token_hit_rate
from spanlab.report.table import (
    Cell,
    Column,
    Table,
    hidden,
    percent_interval,
    placeholder,
    seconds_interval,
    word,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis, XAxis, YAxis
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch


# ------------------------------------------------------------------------------
# The results of a sweep as rows: arm by point.
# ------------------------------------------------------------------------------

Value = str | float

#: Axis names of swept settings; other settings are named by their key.
NAMES = {
    "compared": "model",
    "traffic": "workload",
    "workload.rag.order": "order of passages",
    "workload.rag.passage_tokens": "tokens per passage",
    "workload.rag.k": "passages per prompt",
    "workload.rag.zipf": "Zipf exponent of popularity",
    "arrivals.clients": "requests in flight",
    "workload.ragpulse.rate_rps": "offered load (requests/s)",
    "workload.questions_per_document": "questions per document",
    "arrivals.rate_rps": "offered load (requests/s)",
    "arrivals.order": "arrival order",
    "store.tiers.host.bandwidth_gb_s": "bandwidth of the host tier (GB/s)",
    "store.total_gib": "memory budget (GiB)",
    "store.state_ratio": "states ÷ KV (bytes)",
    "split": "model and memory",
}


@dataclass(frozen=True)
class SweepPoint:
    """One value of one swept setting, or one combination of several.

    `settings` every setting of the point by key, as on the command line
    `run`      the name of the run's folder; empty where it has none
    `summary`  the run's `summary.json`; None where it failed
    `failure`  why the run, or some of its arms, failed, in one sentence
    """

    axis: str
    value: Value
    run: str
    summary: Mapping[str, Any] | None
    failure: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Every setting of the point, as on the command line."""
        return " ".join(f"{key}={value}" for key, value in self.settings.items())

    def findings(self, analysis: str) -> Any:
        """Return the entry of an analysis in the summary of a point that ran."""
        assert self.summary is not None, "only points that ran are shown"
        return self.summary[analysis]


@dataclass(frozen=True)
class SweepRow:
    """One arm at one point; intervals are those of the run's summary, None where it has none."""

    axis: str
    value: Value
    arm: str
    family: str
    token_hit_rate: float
    token_hit_rate_low: float | None
    token_hit_rate_high: float | None
    bound: float
    finds: str
    ttft_mean_s: float | None
    ttft_mean_s_low: float | None
    ttft_mean_s_high: float | None


def as_value(text: str) -> Value:
    """Return the text as a number if it is numeric, and unchanged otherwise."""
    try:
        return float(text)
    except ValueError:
        return text


def value_text(value: Value) -> str:
    """A value as short text."""
    return value if isinstance(value, str) else f"{value:g}"


def axis_name(key: str) -> str:
    """Return the name of a swept setting, with its unit."""
    return " × ".join(NAMES.get(setting, setting) for setting in key.split())


def single_setting_points(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """Return the points of axes that vary one setting."""
    return [point for point in points if len(point.settings) < 2]


def by_axis(points: Sequence[SweepPoint]) -> dict[str, list[SweepPoint]]:
    """Group points by swept setting, in the given order."""
    groups: dict[str, list[SweepPoint]] = {}
    for point in points:
        groups.setdefault(point.axis, []).append(point)
    return groups


def sweep_rows(points: Sequence[SweepPoint]) -> list[SweepRow]:
    """Return a row for every arm of every point that ran."""
    rows = []
    for point in points:
        if point.summary is None:
            continue
        for arm, summary in point.summary["arms"].items():
            hits, ttft = token_hit_rate(summary), mean_ttft(summary)
            row = SweepRow(
                axis=point.axis,
                value=point.value,
                arm=arm,
                family=summary["family"],
                token_hit_rate=hits.mean,
                token_hit_rate_low=hits.low,
                token_hit_rate_high=hits.high,
                bound=summary["own_bound_tokens"] / (summary["tokens"]["prompt"] or 1),
                finds=summary["finds"],
                ttft_mean_s=ttft.mean,
                ttft_mean_s_low=ttft.low,
                ttft_mean_s_high=ttft.high,
            )
            rows.append(row)
    return rows


def footer_of(ran: Sequence[SweepPoint]) -> str:
    """Return the provenance of points that ran; the store is that of points where it is not
    varied."""
    summaries = [point.summary or {} for point in ran]
    stores = [
        summary["store"]
        for point, summary in zip(ran, summaries, strict=True)
        if "store" not in point.axis
    ]
    seeds = len(summaries[0]["seeds"])
    texts = [
        summaries[0]["study"],
        _distinct(
            f"{summary['workload']['name']} ({summary['workload']['provenance']})"
            for summary in summaries
        ),
        _distinct(summary["model"] for summary in summaries),
        _distinct(f"{summary['timing']} on {summary['hardware']}" for summary in summaries),
        "simulated" if summaries[0]["backend"] == "sim" else "measured",
        f"store {_distinct(stores)} where not varied" if stores else "",
        f"{seeds} seed{'s' * (seeds > 1)}",
        f"commit {_distinct(sorted(summary['commit'] for summary in summaries))}",
    ]
    return " · ".join(text for text in texts if text)


def _distinct(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


# ------------------------------------------------------------------------------
# One panel of a sweep: lines over numbers, dots over categories, names of arms beside them.
# ------------------------------------------------------------------------------

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
        """Return lengths of the 95 % intervals below and above the values, shape (2, rows); 0
        without an interval."""
        return [
            [self._length(row, "low") for row in rows],
            [self._length(row, "high") for row in rows],
        ]

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


class Panel:
    """The axes of one swept setting and the rows to draw; `strokes` by arm."""

    def __init__(
        self,
        ax: Axes,
        rows: Sequence[SweepRow],
        strokes: Mapping[str, style.Stroke],
        measure: Measure,
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
            # the largest bound over arms by value, as requests in flight at a lookup differ by arm
            bounds: dict[str, dict[float, float]] = {}
            for row in (row for rows in self._arms.values() for row in rows):
                levels = bounds.setdefault(row.finds, {})
                value = float(row.value)
                levels[value] = max(100 * row.bound, levels.get(value, 0.0))
            for finds, levels in bounds.items():
                x, name = sorted(levels), f"infinite cache:\n{finds}"
                y = [levels[value] for value in x]
                self._ax.plot(
                    x,
                    y,
                    color=style.INK,
                    linewidth=1,
                    linestyle=style.BOUND_LINES[finds],
                    label=name,
                )
                ends.append(_End(name, x[-1], y[-1], style.INK))
        _log_where_wide(self._ax.xaxis, values)
        self._ax.set_xticks(values, [value_text(value) for value in values])
        self._set_limits(self._ax.yaxis)
        style.label(self._ax, axis_name(key), self._measure.name, size=9)
        # write names beside the right ends of the lines, without overlaps
        to_axes = self._ax.transData + self._ax.transAxes.inverted()
        heights = to_axes.transform([(end.x, end.y) for end in ends])[:, 1]
        lines = np.array([1 + end.name.count("\n") for end in ends])
        label_heights = spread(heights, lines * _LABEL_IN / self._size_in(1))
        leader: dict[str, Any] = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2}
        for end, height, label_height in zip(ends, heights, label_heights, strict=True):
            self._ax.annotate(
                end.name,
                (1.0, float(height)),
                (_NAMES_X, float(label_height)),
                xycoords="axes fraction",
                fontsize=_LABEL_PT,
                color=end.colour,
                va="center",
                annotation_clip=False,
                arrowprops={**leader, "color": end.colour, "relpos": (0, 0.5)},
            )

    def _draw_line(self, arm: str, rows: Sequence[SweepRow]) -> _End:
        stroke, ordered = self._strokes[arm], sorted(rows, key=lambda row: row.value)
        x, y = [float(row.value) for row in ordered], [self._measure.of(row) for row in ordered]
        options = {"color": stroke.colour, "linestyle": stroke.line, "linewidth": 1.2}
        self._ax.plot(
            x, y, marker=stroke.marker, markersize=4.5, label=arm, clip_on=False, **options
        )
        reach = self._measure.reach(ordered)
        if np.any(reach):
            self._ax.errorbar(
                x, y, yerr=reach, fmt="none", ecolor=stroke.colour, elinewidth=0.8, capsize=1.5
            )
        return _End(arm, x[-1], y[-1], stroke.colour)

    def _size_in(self, side: int) -> float:
        """Return the width (0) or height (1) of the panel in inches."""
        figure = self._ax.get_figure(root=True)
        assert figure is not None, "a panel is part of a figure"
        return float(self._ax.get_position().size[side] * figure.get_size_inches()[side])

    def _draw_categories(self, texts: Sequence[str]) -> None:
        """Draw one row per arm and one mark per category; the arm with the best first category is
        on top."""
        order = sorted(self._arms, key=lambda arm: self._measure.of(self._arms[arm][0]))
        for rank, arm in enumerate(order):
            reach = [self._measure.of(row) for row in self._arms[arm]]
            self._ax.hlines(
                rank, min(reach), max(reach), color=self._strokes[arm].colour, linewidth=1
            )
        for index, text in enumerate(texts):
            rows = {row.arm: row for row in self._all() if value_text(row.value) == text}
            shown = [(rank, rows[arm]) for rank, arm in enumerate(order) if arm in rows]
            colours = [self._strokes[row.arm].colour for _, row in shown]
            x = [self._measure.of(row) for _, row in shown]
            # the marks of a category are above or below the line of their arm
            above = _CATEGORY_STEP * ((len(texts) - 1) / 2 - index)
            y = [rank + above for rank, _ in shown]
            spread_x = self._measure.reach([row for _, row in shown])
            self._ax.errorbar(x, y, xerr=spread_x, fmt="none", ecolor=style.INK, elinewidth=0.7)
            self._ax.scatter(
                x,
                y,
                s=20,
                marker=_CATEGORY_MARKS[index % len(_CATEGORY_MARKS)],
                facecolors="white" if index else colours,
                edgecolors=colours,
                linewidths=1.1,
                clip_on=False,
                label=text,
                zorder=3,
            )
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
        style.log_scale(axis, min(values), max(values))
    return wide


def spread(centres: NDArray[np.float64], sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return centres of labels of these sizes, close to the given centres and in their order,
    without overlaps.

    All are shares of a panel's height; labels may exceed the panel by `_OVERHANG` above and below.
    """
    from scipy.optimize import isotonic_regression

    order = np.argsort(centres, kind="stable")
    sizes = sizes[order] * min(1.0, (1 + 2 * _OVERHANG) / sizes.sum())
    apart = np.concatenate([[0.0], np.cumsum((sizes[1:] + sizes[:-1]) / 2)])
    # ordered least squares: isotonic regression of the centres minus the distances between labels
    free: NDArray[np.float64] = np.clip(
        isotonic_regression(centres[order] - apart).x, -_OVERHANG, 1 + _OVERHANG - apart[-1]
    )
    spread_centres = np.empty_like(free)
    spread_centres[order] = free + apart
    return spread_centres


# ------------------------------------------------------------------------------
# The figure of a sweep: one panel per swept setting.
# ------------------------------------------------------------------------------

_PANEL_IN = 3.1
_FIGURE_TOP_IN, _FIGURE_BOTTOM_IN = 0.62, 0.95


def draw_sweep(points: Sequence[SweepPoint], field: str) -> Figure | None:
    """Draw one measure of every arm by every swept setting; None where no arm has the measure.

    `field` is token_hit_rate or ttft_mean_s; error bars are the 95 % intervals of the runs.
    """
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpec

    ran = [point for point in single_setting_points(points) if point.summary is not None]
    rows = [row for row in sweep_rows(ran) if getattr(row, field) is not None]
    if not rows:
        return None
    groups, measure = by_axis(ran), _measure(field, rows)
    strokes = style.strokes(dict.fromkeys((row.arm, row.family) for row in rows))
    # two panels per row; with an odd number of panels, the first one fills a row
    odd, lines = len(groups) % 2, (len(groups) + 1) // 2
    height = _PANEL_IN * lines + _FIGURE_TOP_IN + _FIGURE_BOTTOM_IN - 0.5
    figure = Figure(figsize=(style.WIDTH_IN, height), dpi=style.DPI)
    sides = {"left": 0.08, "right": 0.835, "wspace": 0.75, "hspace": 0.42}
    ends = {"top": 1 - _FIGURE_TOP_IN / height, "bottom": _FIGURE_BOTTOM_IN / height}
    grid = GridSpec(lines, 2, figure, **sides, **ends)
    slots = [grid[0, :]] * odd + [grid[cell] for cell in product(range(odd, lines), range(2))]
    panels = [figure.add_subplot(slot) for slot in slots]
    style.add_title(figure, f"{measure.title}, one setting varied at a time")
    style.add_footer(figure, footer_of(ran))
    for (key, group), ax in zip(groups.items(), panels, strict=True):
        style.plain(ax)
        panel = Panel(ax, [row for row in rows if row.axis == key], strokes, measure)
        panel.draw(key, [point.value for point in group])
        title = f"by {axis_name(key).partition(' (')[0]}"
        ax.set_title(title, loc="left", fontsize=9.5, color=style.INK)
    return figure


def _measure(field: str, rows: Sequence[SweepRow]) -> Measure:
    if field == HIT_RATE.field:
        return HIT_RATE
    unit = style.time_unit(max(row.ttft_mean_s or 0.0 for row in rows))
    return Measure(field, f"mean TTFT ({unit.name})", unit.factor)


# ------------------------------------------------------------------------------
# The tables of a sweep: every row, and one table per swept setting with a column per value.
# ------------------------------------------------------------------------------

_RATE_NOTE = (
    "token hit rate = reused ÷ prompt tokens; [a, b] = 95 % interval of the point's own summary"
)
_TTFT_NOTE = "TTFT = first token − arrival, queueing included; – = saturated, no steady-state delay"


def sweep_tables(points: Sequence[SweepPoint]) -> tuple[Table, ...]:
    """Every table of a sweep: rates by setting, times by setting, rows."""
    return *rate_tables(points), *ttft_tables(points), rows_table(points)


def rows_table(points: Sequence[SweepPoint]) -> Table:
    """Return one row per arm and point, for CSV and the tracker only; rates are shares of prompt
    tokens."""
    columns = tuple(Column(field.name, "") for field in fields(SweepRow))
    rows = [tuple(map(hidden, asdict(row).values())) for row in sweep_rows(points)]
    return Table("sweep", "Every arm at every point", columns, tuple(rows))


def rate_tables(points: Sequence[SweepPoint]) -> tuple[Table, ...]:
    """Token hit rate by arm and value, one table per swept setting."""
    return tuple(
        _table(
            "token_hit_rate",
            "token hit rate",
            key,
            group,
            lambda row: percent_interval(
                (row.token_hit_rate, row.token_hit_rate_low, row.token_hit_rate_high)
            ),
            _RATE_NOTE,
        )
        for key, group in _groups(points)
    )


def ttft_tables(points: Sequence[SweepPoint]) -> tuple[Table, ...]:
    """Mean TTFT by arm and value, one table per swept setting."""
    return tuple(
        _table(
            "ttft_mean_s",
            "mean TTFT",
            key,
            group,
            lambda row: seconds_interval(
                (row.ttft_mean_s, row.ttft_mean_s_low, row.ttft_mean_s_high)
            ),
            _TTFT_NOTE,
        )
        for key, group in _groups(points)
    )


def _groups(points: Sequence[SweepPoint]) -> list[tuple[str, list[SweepPoint]]]:
    return [
        (key, list({point.value: point for point in group}.values()))
        for key, group in by_axis(points).items()
    ]


def _table(
    name: str,
    label: str,
    key: str,
    points: list[SweepPoint],
    cell: Callable[[SweepRow], Cell],
    note: str,
) -> Table:
    """Return a row per arm and a column per value; transposed where an axis combines settings."""
    cells_by_arm = {(row.arm, row.value): cell(row) for row in sweep_rows(points)}
    arms = list(dict.fromkeys(arm for arm, _ in cells_by_arm))
    values = [point.value for point in points]
    text = {value: value_text(value) for value in values}
    file = f"{name}_by_{key.replace('/', ':').replace(' ', '+')}"
    title = f"{label} by {axis_name(key)}"
    if len(points[0].settings) > 1:
        columns = (Column("point", "point", left=True), *(Column(arm, arm) for arm in arms))
        lines = [
            (word(text[value]), *(_cell_at(cells_by_arm, arm, value) for arm in arms))
            for value in values
        ]
    else:
        columns = (
            Column("arm", "arm", left=True),
            *(Column(str(value), text[value]) for value in values),
        )
        lines = [
            (word(arm), *(_cell_at(cells_by_arm, arm, value) for value in values)) for arm in arms
        ]
    return Table(file, title, columns, tuple(lines), (note,))


def _cell_at(cells_by_arm: Mapping[tuple[str, Value], Cell], arm: str, value: Value) -> Cell:
    return cells_by_arm.get((arm, value), placeholder("failed"))


def failures(points: Sequence[SweepPoint]) -> list[str]:
    """Return one sentence for each point that failed in full or in part."""
    return list(dict.fromkeys(point.failure for point in points if point.failure))


# ------------------------------------------------------------------------------
# A grid of the points of a product of settings: the first half varies by row, the others by
# column.
# ------------------------------------------------------------------------------

_ROW_IN, _POINT_GRID_TOP_IN, _POINT_GRID_BOTTOM_IN, _LEFT_IN = 0.36, 1.1, 0.75, 2.3
PALE = 0.35  # opacity of cells whose interval shows no difference
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")


@dataclass(frozen=True)
class GridCell:
    """Content of the cell of a point; `shown` is False where the interval does not support it."""

    colour: str
    text: str
    shown: bool = True


@dataclass(frozen=True)
class _Grid:
    """Points by the values of their settings."""

    points: Mapping[tuple[str, ...], SweepPoint]
    keys: tuple[str, ...]

    @staticmethod
    def of(points: Sequence[SweepPoint]) -> _Grid:
        keys = tuple(points[0].settings)
        return _Grid({tuple(point.settings.values()): point for point in points}, keys)

    @property
    def split(self) -> int:
        """Number of settings that vary by row."""
        return (len(self.keys) + 1) // 2

    def values(self, numbers: range) -> list[tuple[str, ...]]:
        """Return the combinations of the values of these settings, in the order of the points."""
        lists = [
            list(dict.fromkeys(values[number] for values in self.points)) for number in numbers
        ]
        return list(product(*lists))


def draw_grid(
    points: Sequence[SweepPoint],
    title: str,
    legend: Mapping[str, str],
    notes: Sequence[Patch],
    cell: Callable[[SweepPoint], GridCell | None],
) -> Figure:
    """Draw a cell per point; `legend` maps labels to colours, `notes` are additional entries of the
    legend."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    grid = _Grid.of(points)
    downs, acrosses = grid.values(range(grid.split)), grid.values(range(grid.split, len(grid.keys)))
    height = _ROW_IN * len(downs) + _POINT_GRID_TOP_IN + _POINT_GRID_BOTTOM_IN
    figure = Figure(figsize=(style.WIDTH_IN, height), dpi=style.DPI)
    bottom, top = _POINT_GRID_BOTTOM_IN / height, 1 - _POINT_GRID_TOP_IN / height
    ax = figure.add_axes(
        (_LEFT_IN / style.WIDTH_IN, bottom, 0.985 - _LEFT_IN / style.WIDTH_IN, top - bottom)
    )
    for (row, down), (column, across) in product(enumerate(downs), enumerate(acrosses)):
        point = grid.points.get((*down, *across))
        content = None if point is None else cell(point)
        if content is None:
            continue
        look: dict[str, Any] = {"facecolor": content.colour, "edgecolor": "white", "lw": 2}
        ax.add_patch(Rectangle((column, row), 1, 1, alpha=1.0 if content.shown else PALE, **look))
        ink = "white" if content.shown else style.INK
        at: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7.5}
        ax.text(column + 0.5, row + 0.5, content.text, color=ink, **at)
    _name_axes(ax, grid, downs, acrosses)
    style.add_title(figure, title)
    patches = [*(Patch(color=colour, label=label) for label, colour in legend.items()), *notes]
    figure.legend(
        handles=patches,
        fontsize=7.5,
        frameon=False,
        handlelength=1,
        loc="upper left",
        bbox_to_anchor=(0.01, 1 - 0.36 / height),
        ncols=len(patches),
    )
    style.add_footer(figure, footer_of(points))
    return figure


def _name_axes(
    ax: Axes, grid: _Grid, downs: Sequence[tuple[str, ...]], acrosses: Sequence[tuple[str, ...]]
) -> None:
    """Write the values of the settings at the rows and above the columns."""
    ax.set(xlim=(0, len(acrosses)), ylim=(len(downs), 0))
    ax.set_xticks(
        [index + 0.5 for index in range(len(acrosses))],
        ["\n".join(values) for values in acrosses],
        fontsize=8,
    )
    ax.set_yticks(
        [index + 0.5 for index in range(len(downs))],
        [" · ".join(values) for values in downs],
        fontsize=8,
    )
    ax.xaxis.tick_top()
    ax.tick_params(length=0, labelcolor=style.INK)
    ax.spines[:].set_visible(False)
    sides = [
        " · ".join(map(axis_name, keys))
        for keys in (grid.keys[: grid.split], grid.keys[grid.split :])
    ]
    across = f"\nacross: {sides[1]}" if sides[1] else ""
    ax.set_xlabel(f"down: {sides[0]}{across}", fontsize=8, color=style.INK)

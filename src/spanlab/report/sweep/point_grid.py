"""A grid of the points of a product of settings: the first half varies by row, the others by column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from spanlab.report.drawing import style
from spanlab.report.sweep.data import SweepPoint, axis_name, footer_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

_ROW_IN, _TOP_IN, _BOTTOM_IN, _LEFT_IN = 0.36, 1.1, 0.75, 2.3
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
        lists = [list(dict.fromkeys(values[number] for values in self.points)) for number in numbers]
        return list(product(*lists))


def draw_grid(
    points: Sequence[SweepPoint],
    title: str,
    legend: Mapping[str, str],
    notes: Sequence[Patch],
    cell: Callable[[SweepPoint], GridCell | None],
) -> Figure:
    """Draw a cell per point; `legend` maps labels to colours, `notes` are additional entries of the legend."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    grid = _Grid.of(points)
    downs, acrosses = grid.values(range(grid.split)), grid.values(range(grid.split, len(grid.keys)))
    height = _ROW_IN * len(downs) + _TOP_IN + _BOTTOM_IN
    figure = Figure(figsize=(style.WIDTH_IN, height), dpi=style.DPI)
    bottom, top = _BOTTOM_IN / height, 1 - _TOP_IN / height
    ax = figure.add_axes((_LEFT_IN / style.WIDTH_IN, bottom, 0.985 - _LEFT_IN / style.WIDTH_IN, top - bottom))
    for row, down in enumerate(downs):
        for column, across in enumerate(acrosses):
            point = grid.points.get((*down, *across))
            content = None if point is None else cell(point)
            if content is not None:
                _draw_cell(ax, column, row, content)
    _name_axes(ax, grid, downs, acrosses)
    style.add_title(figure, title)
    _legend(
        figure, [*(Patch(color=colour, label=label) for label, colour in legend.items()), *notes], 1 - 0.36 / height
    )
    style.add_footer(figure, footer_of(points))
    return figure


def _draw_cell(ax: Axes, column: int, row: int, cell: GridCell) -> None:
    from matplotlib.patches import Rectangle

    opacity = 1.0 if cell.shown else PALE
    ax.add_patch(Rectangle((column, row), 1, 1, facecolor=cell.colour, alpha=opacity, edgecolor="white", lw=2))
    ink = "white" if cell.shown else style.INK
    ax.text(column + 0.5, row + 0.5, cell.text, ha="center", va="center", fontsize=7.5, color=ink)


def _name_axes(ax: Axes, grid: _Grid, downs: Sequence[tuple[str, ...]], acrosses: Sequence[tuple[str, ...]]) -> None:
    """Write the values of the settings at the rows and above the columns."""
    ax.set(xlim=(0, len(acrosses)), ylim=(len(downs), 0))
    ax.set_xticks(
        [index + 0.5 for index in range(len(acrosses))], ["\n".join(values) for values in acrosses], fontsize=8
    )
    ax.set_yticks([index + 0.5 for index in range(len(downs))], [" · ".join(values) for values in downs], fontsize=8)
    ax.xaxis.tick_top()
    ax.tick_params(length=0, labelcolor=style.INK)
    ax.spines[:].set_visible(False)
    sides = [" · ".join(map(axis_name, keys)) for keys in (grid.keys[: grid.split], grid.keys[grid.split :])]
    across = f"\nacross: {sides[1]}" if sides[1] else ""
    ax.set_xlabel(f"down: {sides[0]}{across}", fontsize=8, color=style.INK)


def _legend(figure: Figure, patches: Sequence[Patch], top: float) -> None:
    figure.legend(
        handles=list(patches),
        fontsize=7.5,
        frameon=False,
        handlelength=1,
        loc="upper left",
        bbox_to_anchor=(0.01, top),
        ncols=len(patches),
    )

"""The figure of the analysis `families`: which family has the lowest mean TTFT where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from spanlab.report import style
from spanlab.report.families import families_of, words
from spanlab.report.sweep_data import SweepPoint, axis_name, footer_of
from spanlab.report.units import MISSING

_ROW_IN, _TOP_IN, _BOTTOM_IN, _LEFT_IN = 0.36, 1.1, 0.75, 2.3
_PALE = 0.35  # opacity where no lead is shown
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")


@dataclass(frozen=True)
class _Grid:
    """Points by the values of their settings: the first half of the settings goes down, the rest across."""

    points: Mapping[tuple[str, ...], SweepPoint]
    keys: tuple[str, ...]

    @staticmethod
    def of(points: Sequence[SweepPoint]) -> _Grid:
        keys = tuple(points[0].settings)
        return _Grid({tuple(point.settings.values()): point for point in points}, keys)

    @property
    def split(self) -> int:
        """How many settings go down."""
        return (len(self.keys) + 1) // 2

    def values(self, numbers: range) -> list[tuple[str, ...]]:
        """Combinations of the values of some settings, in the order in which they were given."""
        lists = [list(dict.fromkeys(values[number] for values in self.points)) for number in numbers]
        return list(product(*lists))


def draw_winners(points: Sequence[SweepPoint]) -> Figure:
    """A cell per point of one product of settings, coloured by the family with the lowest mean TTFT."""
    grid = _Grid.of(points)
    downs, acrosses = grid.values(range(grid.split)), grid.values(range(grid.split, len(grid.keys)))
    height = _ROW_IN * len(downs) + _TOP_IN + _BOTTOM_IN
    figure = Figure(figsize=(style.WIDTH_IN, height), dpi=style.DPI)
    bottom, top = _BOTTOM_IN / height, 1 - _TOP_IN / height
    ax = figure.add_axes((_LEFT_IN / style.WIDTH_IN, bottom, 0.985 - _LEFT_IN / style.WIDTH_IN, top - bottom))
    names = list(dict.fromkeys(entry["family"] for point in points for entry in families_of(point)["entries"]))
    colours = dict(zip(names, _COLOURS, strict=False))
    for row, down in enumerate(downs):
        for column, across in enumerate(acrosses):
            point = grid.points.get((*down, *across))
            if point is not None:
                _draw_cell(ax, column, row, families_of(point), colours)
    _name_axes(ax, grid, downs, acrosses)
    style.add_title(figure, f"The family with the lowest mean TTFT, and its speedup over {words(names[0])}")
    _legend(figure, colours, 1 - 0.36 / height)
    style.add_footer(figure, footer_of(points))
    return figure


def _draw_cell(ax: Axes, column: int, row: int, found: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    lead = found["lead"]
    if lead is None:
        return
    best = next(entry for entry in found["entries"] if entry["family"] == lead["family"])
    opacity = 1.0 if lead["shown"] else _PALE
    box = Rectangle((column, row), 1, 1, facecolor=colours[best["family"]], alpha=opacity, edgecolor="white", lw=2)
    ax.add_patch(box)
    ink = "white" if lead["shown"] else style.INK
    text = f"{_speedup(best, found)} · {100 * best['token_hit_rate']:.0f} %"
    ax.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=7.5, color=ink)


def _speedup(best: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Over the first family; missing where a queue grew, or the machine was noisy."""
    if best is found["entries"][0]:
        return "1 ×"
    return MISSING if best["speedup"] is None else f"{best['speedup']['mean']:.2g} ×"


def _name_axes(ax: Axes, grid: _Grid, downs: Sequence[tuple[str, ...]], acrosses: Sequence[tuple[str, ...]]) -> None:
    """Values of the settings at the rows and above the columns."""
    ax.set(xlim=(0, len(acrosses)), ylim=(len(downs), 0))
    ax.set_xticks([at + 0.5 for at in range(len(acrosses))], ["\n".join(values) for values in acrosses], fontsize=8)
    ax.set_yticks([at + 0.5 for at in range(len(downs))], [" · ".join(values) for values in downs], fontsize=8)
    ax.xaxis.tick_top()
    ax.tick_params(length=0, labelcolor=style.INK)
    ax.spines[:].set_visible(False)
    sides = [" · ".join(map(axis_name, keys)) for keys in (grid.keys[: grid.split], grid.keys[grid.split :])]
    across = f"; across: {sides[1]}" if sides[1] else ""
    ax.set_xlabel(f"down: {sides[0]}{across}", fontsize=8, color=style.INK)


def _legend(figure: Figure, colours: Mapping[str, str], top: float) -> None:
    patches = [Patch(color=colour, label=words(name)) for name, colour in colours.items()]
    pale = Patch(facecolor="#888888", alpha=_PALE, label="pale: lead not shown")
    said = Patch(facecolor="none", label="a × · b %: speedup · token hit rate")
    where = {"loc": "upper left", "bbox_to_anchor": (0.01, top), "ncols": len(patches) + 2}
    figure.legend(handles=[*patches, pale, said], fontsize=7.5, frameon=False, handlelength=1, **where)

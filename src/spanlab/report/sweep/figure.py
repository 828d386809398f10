"""The figure of a sweep: one panel per swept setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from spanlab.report.drawing import scales, style
from spanlab.report.sweep.data import (
    SweepPoint,
    SweepRow,
    axis_name,
    by_axis,
    footer_of,
    single_setting_points,
    sweep_rows,
)
from spanlab.report.sweep.panels import HIT_RATE, Measure, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL_IN = 3.1
_TOP_IN, _BOTTOM_IN = 0.62, 0.95


def draw_sweep(points: Sequence[SweepPoint], field: str) -> Figure | None:
    """Draw one measure of every arm by every swept setting; None where no arm has the measure.

    `field` is token_hit_rate or ttft_mean_s; error bars are the 95 % intervals of the runs.
    """
    ran = [point for point in single_setting_points(points) if point.summary is not None]
    rows = [row for row in sweep_rows(ran) if getattr(row, field) is not None]
    if not rows:
        return None
    groups, measure = by_axis(ran), _measure(field, rows)
    strokes = style.strokes(dict.fromkeys((row.arm, row.family) for row in rows))
    figure, panels = _frame(groups, ran, measure)
    for (key, group), ax in zip(groups.items(), panels, strict=True):
        panel = Panel(ax, [row for row in rows if row.axis == key], strokes, measure)
        panel.draw(key, [point.value for point in group])
        title = f"by {axis_name(key).partition(' (')[0]}"
        ax.set_title(title, loc="left", fontsize=9.5, color=style.INK)
    return figure


def _measure(field: str, rows: Sequence[SweepRow]) -> Measure:
    if field == HIT_RATE.field:
        return HIT_RATE
    unit = scales.time_unit(max(row.ttft_mean_s or 0.0 for row in rows))
    return Measure(field, f"mean TTFT ({unit.name})", unit.factor)


def _frame(
    groups: Mapping[str, Sequence[SweepPoint]], ran: Sequence[SweepPoint], measure: Measure
) -> tuple[Figure, list[Axes]]:
    """Return a figure with two panels per row; with an odd number of panels, the first one fills a row."""
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpec

    odd = len(groups) % 2
    lines = (len(groups) + 1) // 2
    height = _PANEL_IN * lines + _TOP_IN + _BOTTOM_IN - 0.5
    figure = Figure(figsize=(style.WIDTH_IN, height), dpi=style.DPI)
    sides = {"left": 0.08, "right": 0.835, "wspace": 0.75, "hspace": 0.42}
    ends = {"top": 1 - _TOP_IN / height, "bottom": _BOTTOM_IN / height}
    grid = GridSpec(lines, 2, figure, **sides, **ends)
    cells = [(line, column) for line in range(odd, lines) for column in range(2)]
    slots = [grid[0, :]] * odd + [grid[cell] for cell in cells]
    panels = [figure.add_subplot(slot) for slot in slots]
    for ax in panels:
        style.plain(ax)
    style.add_title(figure, f"{measure.title}, one setting varied at a time")
    style.add_footer(figure, footer_of(ran))
    return figure, panels

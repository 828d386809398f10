"""Quality over tokens that repair recomputes: one line per method, through its budgets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanlab.report.drawing import scales, style
from spanlab.report.methods.data import PLAIN, Entry, Line, MethodData, budgets, ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MEASURES = (
    ("gold_loss_change", "gold loss minus that of full recompute (nats)"),
    ("kl", "KL to full recompute (nats)"),
)


def draw(data: MethodData) -> Figure | None:
    """Draw the change of gold loss, and KL, of methods that ran with several budgets; None without any."""
    lines = budgets(data.methods)
    if not lines:
        return None
    names = [*lines, PLAIN, "full recompute", "floor"]
    figure, [axes] = style.framed_with(
        data.footer, "Quality over recomputed tokens", cols=2, margins=style.margins_for(names), wspace=0.32
    )
    strokes = style.strokes((name, line[0][1]["family"]) for name, line in lines.items())
    for ax, (key, label) in zip(axes, _MEASURES, strict=True):
        for name, line in lines.items():
            _draw_line(ax, name, line, key, strokes[name])
        if PLAIN in data.methods:
            _draw_plain(ax, data.methods[PLAIN], key)
        ax.axhline(0, color="#777777", linewidth=0.8, linestyle=(0, (4, 2)), label="full recompute")
        floor = abs(data.floor[key]["mean"])
        ax.axhline(floor, color=style.INK, linewidth=0.8, linestyle=(0, (1, 1.5)), label="floor")
        scales.count_ticks(ax.xaxis)
        style.label(ax, "computed prompt tokens, mean", label)
    style.legend_right(axes[1])
    return figure


def _draw_plain(ax: Axes, entry: Entry, key: str) -> None:
    colour, marker = style.family_style(entry["family"])
    ax.plot(entry["computed_tokens"]["mean"], entry[key]["mean"], marker, color=colour, markersize=6, label=PLAIN)


def _draw_line(ax: Axes, name: str, line: Line, key: str, stroke: style.Stroke) -> None:
    x = [entry["computed_tokens"]["mean"] for _, entry in line]
    y = [entry[key]["mean"] for _, entry in line]
    ax.plot(x, y, markersize=5, label=name, **stroke.options)
    reach = [ends(entry[key]) for _, entry in line]
    if all(reach):
        low, high = zip(*[interval for interval in reach if interval], strict=True)
        ax.fill_between(x, low, high, color=stroke.colour, alpha=0.12, linewidth=0)

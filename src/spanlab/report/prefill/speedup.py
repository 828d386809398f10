"""Speedups by prompt length, beside the ratios of bounds: one panel per arm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from spanlab.report.drawing import scales, style
from spanlab.report.prefill.axes import below_axes, length_axis
from spanlab.report.prefill.data import Entry, PrefillData, curve

if TYPE_CHECKING:
    from matplotlib.typing import LineStyleType

_COLS = 4
_DOTS = (0, (1.5, 1.2))
_LINES: tuple[LineStyleType, ...] = ("-", (0, (4, 1.5)), (0, (2, 1)), (0, (6, 1.5, 1.5, 1.5)))


def draw(data: PrefillData) -> Figure | None:
    """Ratios of mean TTFT with 95 % bands, ratios of bounds dotted; None without speedups or with one length only."""
    own = [entry for entry in data.others() if entry["speedup"] and entry["reused_tokens"]]
    lengths = sorted({entry["prompt_tokens"] for entry in own})
    if len(lengths) < 2:
        return None
    arms, names = (list(dict.fromkeys(found)) for found in ([e["arm"] for e in own], map(data.name, own)))
    rows = -(-len(arms) // _COLS)
    figure, axes = style.framed_with(
        data.footer,
        "Speedup of TTFT over the baseline, and the ratio of both bounds (dotted)",
        rows,
        _COLS,
        height=1.75 + 1.75 * rows,
        share=("all", "all"),
        margins=style.Margins(top=1.05),
        hspace=0.35,
        wspace=0.12,
    )
    panels = [ax for row in axes for ax in row]
    strokes = style.strokes(data.families().items())
    for ax, arm in zip(panels, arms, strict=False):
        for at, name in enumerate(names):
            points = [entry for entry in own if entry["arm"] == arm and data.name(entry) == name]
            _draw_curve(ax, curve(points), strokes[arm], _LINES[at % len(_LINES)])
        ax.axhline(1, color="#999999", linewidth=0.6)
        ax.set_title(arm, fontsize=8, loc="left", color=style.INK, pad=3)
    for at, ax in enumerate(panels[len(arms) :], len(arms)):
        ax.set_axis_off()
        panels[at - _COLS].tick_params(labelbottom=at >= _COLS)
    factors = [value for entry in own for value in (entry["speedup"]["mean"], entry["ratio_of_bounds"]) if value]
    length_axis(panels[0].xaxis, lengths)
    scales.log_scale(panels[0].yaxis, min(factors), max(factors))
    panels[0].set_ylim(min(*factors, 1) / 1.3, max(factors) * 1.3)
    _label(figure, names)
    return figure


def _draw_curve(ax: Axes, own: list[Entry], stroke: style.Stroke, line: LineStyleType) -> None:
    lengths = [entry["prompt_tokens"] for entry in own]
    if all(entry["ratio_of_bounds"] for entry in own):
        bounds = [entry["ratio_of_bounds"] for entry in own]
        ax.plot(lengths, bounds, color=style.INK, linewidth=0.9, linestyle=_DOTS)
    if all(entry["speedup"]["low"] for entry in own):
        low, high = ([entry["speedup"][end] for entry in own] for end in ("low", "high"))
        ax.fill_between(lengths, low, high, color=stroke.colour, alpha=0.2, linewidth=0)
    means = [entry["speedup"]["mean"] for entry in own]
    ax.plot(lengths, means, color=stroke.colour, marker=stroke.marker, markersize=4, linewidth=1.3, linestyle=line)


def _label(figure: Figure, names: list[str]) -> None:
    height = figure.get_figheight()
    figure.supylabel("speedup of TTFT (×)", fontsize=style.LABEL_PT, color=style.INK, x=0.01)
    figure.supxlabel("prompt length (tokens)", fontsize=style.LABEL_PT, color=style.INK, y=below_axes(figure))
    keys = [
        Line2D([], [], color=style.INK, linewidth=1.3, linestyle=_LINES[at % len(_LINES)]) for at in range(len(names))
    ]
    place = 0.07, 1 - 0.3 / height
    figure.legend(keys, names, loc="upper left", bbox_to_anchor=place, ncols=3, fontsize=8, frameon=False)

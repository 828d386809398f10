"""Speedups and ratios of bounds by prompt length: one panel per arm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanlab.report.drawing import scales, style
from spanlab.report.prefill.axes import length_axis, name_axes
from spanlab.report.prefill.data import Entry, PrefillData, curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import LineStyleType

_COLS = 4
_DOTS = (0, (1.5, 1.2))
_LINES: tuple[LineStyleType, ...] = ("-", (0, (4, 1.5)), (0, (2, 1)), (0, (6, 1.5, 1.5, 1.5)))


def draw(data: PrefillData) -> Figure | None:
    """Draw ratios of mean TTFT with 95 % bands, ratios of bounds dotted; None without speedups or two lengths."""
    entries = [entry for entry in data.without_baseline() if entry["speedup"] and entry["reused_tokens"]]
    lengths = sorted({entry["prompt_tokens"] for entry in entries})
    if len(lengths) < 2:
        return None
    arms, names = (list(dict.fromkeys(values)) for values in ([e["arm"] for e in entries], map(data.name, entries)))
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
        for index, name in enumerate(names):
            points = [entry for entry in entries if entry["arm"] == arm and data.name(entry) == name]
            _draw_curve(ax, curve(points), strokes[arm], _LINES[index % len(_LINES)])
        ax.axhline(1, color="#999999", linewidth=0.6)
        ax.set_title(arm, fontsize=8, loc="left", color=style.INK, pad=3)
    for index, ax in enumerate(panels[len(arms) :], len(arms)):
        ax.set_axis_off()
        panels[index - _COLS].tick_params(labelbottom=index >= _COLS)
    factors = [value for entry in entries for value in (entry["speedup"]["mean"], entry["ratio_of_bounds"]) if value]
    length_axis(panels[0].xaxis, lengths)
    scales.log_scale(panels[0].yaxis, min(factors), max(factors))
    panels[0].set_ylim(min(*factors, 1) / 1.3, max(factors) * 1.3)
    _label(figure, names)
    return figure


def _draw_curve(ax: Axes, entries: list[Entry], stroke: style.Stroke, line: LineStyleType) -> None:
    lengths = [entry["prompt_tokens"] for entry in entries]
    if all(entry["ratio_of_bounds"] for entry in entries):
        bounds = [entry["ratio_of_bounds"] for entry in entries]
        ax.plot(lengths, bounds, color=style.INK, linewidth=0.9, linestyle=_DOTS)
    if all(entry["speedup"]["low"] for entry in entries):
        low, high = ([entry["speedup"][end] for entry in entries] for end in ("low", "high"))
        ax.fill_between(lengths, low, high, color=stroke.colour, alpha=0.2, linewidth=0)
    means = [entry["speedup"]["mean"] for entry in entries]
    ax.plot(lengths, means, color=stroke.colour, marker=stroke.marker, markersize=4, linewidth=1.3, linestyle=line)


def _label(figure: Figure, names: list[str]) -> None:
    from matplotlib.lines import Line2D

    name_axes(figure, "prompt length (tokens)", "speedup of TTFT (×)")
    keys = [
        Line2D([], [], color=style.INK, linewidth=1.3, linestyle=_LINES[index % len(_LINES)])
        for index in range(len(names))
    ]
    anchor = 0.07, 1 - 0.3 / figure.get_figheight()
    figure.legend(keys, names, loc="upper left", bbox_to_anchor=anchor, ncols=3, fontsize=8, frameon=False)

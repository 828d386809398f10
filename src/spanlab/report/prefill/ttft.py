"""Time to first token by prompt length: one panel per kind of request, one curve per arm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from spanlab.report.drawing import scales, style
from spanlab.report.prefill.axes import length_axis, name_axes
from spanlab.report.prefill.data import Entry, PrefillData, curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLS = 3


def draw(data: PrefillData) -> Figure | None:
    """Draw medians, with quartiles as bands; None where all prompts have one length."""
    lengths = data.lengths()
    if len(lengths) < 2:
        return None
    names = list(dict.fromkeys(map(data.name, data.entries)))
    strokes = style.strokes(data.families().items())
    margins = style.margins_for(strokes)
    figure, panels = style.panels(
        data.footer,
        "Time to first token of one request at a time (median, quartiles)",
        len(names),
        min(_COLS, len(names)),
        (1.5, 2.2),
        share=("all", "all"),
        margins=style.Margins(left=0.75, right=margins.right, top=0.66),
        hspace=0.32,
        wspace=0.1,
    )
    times = np.array([entry["ttft_s"][point] for entry in data.entries for point in ("p25", "p75")])
    unit = scales.time_unit(times.max())
    for ax, name in zip(panels, names, strict=True):
        entries = [entry for entry in data.entries if data.name(entry) == name]
        for arm, stroke in strokes.items():
            _draw_arm(ax, curve([entry for entry in entries if entry["arm"] == arm]), stroke, unit.factor)
        ax.set_title(name, fontsize=8, loc="left", color=style.INK, pad=3)
    length_axis(panels[0].xaxis, lengths)
    scales.log_scale(panels[0].yaxis, *scales.positive_range(times * unit.factor))
    _label(figure, unit.name, strokes)
    return figure


def _draw_arm(ax: Axes, entries: list[Entry], stroke: style.Stroke, factor: float) -> None:
    lengths = [entry["prompt_tokens"] for entry in entries]
    low, middle, high = ([entry["ttft_s"][point] * factor for entry in entries] for point in ("p25", "p50", "p75"))
    ax.fill_between(lengths, low, high, color=stroke.colour, alpha=0.15, linewidth=0)
    ax.plot(lengths, middle, markersize=4, linewidth=1.2, **stroke.options)


def _label(figure: Figure, unit: str, strokes: dict[str, style.Stroke]) -> None:
    from matplotlib.lines import Line2D

    name_axes(figure, "prompt length (tokens)", f"TTFT ({unit})")
    keys = [Line2D([], [], markersize=4, **stroke.options) for stroke in strokes.values()]
    right = style.margins_for(strokes).right
    anchor = 1 - (right - 0.1) / style.WIDTH_IN, 1 - 0.6 / figure.get_figheight()
    figure.legend(keys, list(strokes), loc="upper left", bbox_to_anchor=anchor, fontsize=8, frameon=False)

"""Time to first token of warm requests, by prompt length."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spanlab.pic_bench.figures.curves import Entries, curves, strokes
from spanlab.report import look, scales
from spanlab.report.data import StudyData

_KEY_TITLE = "median, band: quartiles"


def draw(study: StudyData, entries: Entries) -> Figure:
    """One curve per arm: the same documents again, shuffled where nothing else is said; every arm has its own cache."""
    found = curves(entries)
    figure, [[ax]] = look.framed(
        study, "Time to first token of documents asked about again", margins=look.margins_for([*found, _KEY_TITLE[:-6]])
    )
    unit = scales.time_unit(max(entry["warm_ttft_s"]["p75"] for entry in entries))
    drawn = strokes(found)
    for name, own in found.items():
        _draw_arm(ax, name, own, drawn[name], unit.factor)
    times = np.array([entry["warm_ttft_s"][point] for entry in entries for point in ("p25", "p75")]) * unit.factor
    low, high = scales.positive_range(times)
    scales.log_scale(ax.yaxis, low, high)
    ax.set_ylim(low / 1.3, high * 1.3)
    _length_axis(ax, entries)
    look.label(ax, "prompt length (tokens)", f"TTFT ({unit.name})")
    look.legend_right(ax, title=_KEY_TITLE, title_fontsize=8, alignment="left")
    return figure


def _draw_arm(ax: Axes, name: str, own: Entries, stroke: look.Stroke, factor: float) -> None:
    lengths = [entry["prompt_tokens"] for entry in own]
    low, median, high = ([entry["warm_ttft_s"][point] * factor for entry in own] for point in ("p25", "p50", "p75"))
    ax.fill_between(lengths, low, high, color=stroke.colour, alpha=0.15, linewidth=0)
    ax.plot(
        lengths,
        median,
        color=stroke.colour,
        marker=stroke.marker,
        markersize=5,
        linestyle=stroke.line,
        linewidth=1.3,
        label=name,
    )


def _length_axis(ax: Axes, entries: Entries) -> None:
    lengths = [entry["prompt_tokens"] for entry in entries]
    scales.log_scale(ax.xaxis, min(lengths), max(lengths))
    ax.set_xlim(min(lengths) / 1.2, max(lengths) * 1.2)

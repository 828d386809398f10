"""Cost of captures in a cold prefill, by the number of captured states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from spanlab.analysis.prefill import FEW_STATES, MOST_OVERHEAD, overhead
from spanlab.report.drawing import scales, style
from spanlab.report.prefill.axes import name_axes
from spanlab.report.prefill.data import Entry, PrefillData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLS = 2
_TICKS = (0, 1, 3, 10, 30, 100, 300, 1000)


def draw(data: PrefillData) -> Figure | None:
    """Draw TTFT with captures ÷ TTFT of the baseline − 1, with 95 % intervals, by length; None without captures."""
    entries = [entry for entry in data.without_baseline() if entry["reused_tokens"] == 0 and entry["speedup"]]
    if not any(entry["captured_states"] for entry in entries):
        return None
    lengths = sorted({entry["prompt_tokens"] for entry in entries})
    figure, panels = style.panels(
        data.footer,
        "Capture overhead: cold prefill with captures ÷ without − 1",
        len(lengths),
        min(_COLS, len(lengths)),
        (1.5, 2.3),
        share=("all", "all"),
        margins=style.Margins(left=0.75, right=1.75, top=0.66),
        hspace=0.32,
        wspace=0.1,
    )
    strokes = style.strokes(data.families().items())
    for ax, length in zip(panels, lengths, strict=True):
        goal = 100 * MOST_OVERHEAD
        ax.plot([0, FEW_STATES], [goal, goal], color="#cc3311", linewidth=1.2, label=f"goal, to {FEW_STATES} states")
        for entry in entries:
            if entry["prompt_tokens"] == length:
                _draw_arm(ax, entry, strokes[entry["arm"]])
        ax.set_title(f"{length:,.0f} tokens", fontsize=9, loc="left", color=style.INK, pad=3)
    _states_axis(panels[0], max(entry["captured_states"] for entry in entries))
    _label(figure, panels[0])
    return figure


def _draw_arm(ax: Axes, entry: Entry, stroke: style.Stroke) -> None:
    low, mean, high = overhead(entry)
    middle = 100 * mean
    spread = None if low is None or high is None else np.array([[middle - 100 * low], [100 * high - middle]])
    ax.errorbar(
        entry["captured_states"],
        middle,
        spread,
        label=entry["arm"],
        fmt=stroke.marker,
        color=stroke.colour,
        markersize=5,
        elinewidth=0.9,
    )


def _states_axis(ax: Axes, most: float) -> None:
    """Set the x axis of states: zero, then decades."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ax.set_xscale("symlog", linthresh=1, linscale=0.4)
    ax.xaxis.set_major_locator(FixedLocator([tick for tick in _TICKS if tick <= 2 * most]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(scales.plain_number))
    ax.set_xlim(-0.3, 1.6 * max(most, 1))


def _label(figure: Figure, ax: Axes) -> None:
    name_axes(figure, "states captured in the prefill", "capture overhead (% of the cold prefill)")
    handles, names = ax.get_legend_handles_labels()
    anchor = 1 - 1.68 / style.WIDTH_IN, 1 - 0.6 / figure.get_figheight()
    figure.legend(handles, names, loc="upper left", bbox_to_anchor=anchor, fontsize=8, frameon=False)

"""Prefill time by how much of the prompt was cached, beside what it should be."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from spanlab.checkpoint_bench.figures.lengths import Entries, of_length, shades
from spanlab.report import look, scales
from spanlab.report.data import StudyData

_DASHES, _DOTS = (0, (5, 2)), (0, (1, 1.6))


def draw(study: StudyData, summary: dict[str, Entries]) -> Figure:
    """Dots: every arm and depth, medians and quartiles; lines: this machine's bound and the simulator's roofline."""
    names = ["bound, measured rates", f"simulator, {summary['hardware']}"]
    figure, [[ax]] = look.framed(
        study, "Prefill time by the position of the checkpoint that it starts from", margins=look.margins_for(names)
    )
    unit = scales.time_unit(max(entry["bare_s"]["p75"] for entry in summary["noise"]))
    colours = shades(summary["noise"])
    for length, colour in colours.items():
        _draw_length(ax, summary, length, colour, unit.factor)
    _scale(ax, summary, unit.factor)
    look.label(ax, "cached tokens: position of the state", f"prefill time ({unit.name})")
    keys = [Line2D([], [], color=colour, marker="o", linestyle="", markersize=5) for colour in colours.values()]
    keys += [Line2D([], [], color=look.INK, linestyle=line, linewidth=1) for line in (_DASHES, _DOTS)]
    labels = [*(f"{length:,} tokens" for length in colours), *names]
    ax.legend(keys, labels, loc="upper left", bbox_to_anchor=(1.01, 1.02), fontsize=8.5, frameon=False)
    return figure


def _draw_length(ax: Axes, summary: dict[str, Entries], length: int, colour: str, factor: float) -> None:
    for curve in of_length(summary["curves"], length):
        for side, line in (("bound_s", _DASHES), ("modelled_s", _DOTS)):
            ax.plot(curve["resume"], np.multiply(curve[side], factor), color=colour, linestyle=line, linewidth=1)
    points = [(entry["resume"], entry["ttft_s"]) for entry in of_length(summary["again"], length)]
    points += [(0, entry["bare_s"]) for entry in of_length(summary["noise"], length)]
    middle = np.array([found["p50"] for _, found in points]) * factor
    low, high = (np.array([found[key] for _, found in points]) * factor for key in ("p25", "p75"))
    places = [resume for resume, _ in points]
    ax.errorbar(
        places, middle, (middle - low, high - middle), fmt="o", color=colour, markersize=4, elinewidth=0.8, alpha=0.8
    )


def _scale(ax: Axes, summary: dict[str, Entries], factor: float) -> None:
    times = [entry[key] for entry in (*summary["again"], *summary["noise"]) for key in ("bound_s", "modelled_s")]
    times += [entry["ttft_s"][point] for entry in summary["again"] for point in ("p25", "p75")]
    times += [entry["bare_s"][point] for entry in summary["noise"] for point in ("p25", "p75")]
    low, high = scales.positive_range(np.array(times) * factor)
    scales.log_scale(ax.yaxis, low, high)
    ax.set_ylim(low / 1.4, high * 1.4)
    scales.count_ticks(ax.xaxis)

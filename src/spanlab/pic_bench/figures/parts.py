"""What the time to the first token of a warm request goes to, at the largest size."""

from __future__ import annotations

import statistics

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spanlab.pic_bench.figures.curves import Entries, name_of
from spanlab.report import look, scales, units
from spanlab.report.data import StudyData

#: Colour and name of every part, in the order in which a step does them.
PARTS = {
    "plan_s": ("#332288", "planning"),
    "copy_s": ("#ee7733", "copying and turning"),
    "fill_s": ("#56b4e9", "spans computed alone"),
    "repair_s": ("#999933", "repair"),
    "prefill_s": ("#117733", "ordered text and first token"),
    "other_s": ("#bbbbbb", "rest"),
}

_CUT = 4  # times the median: longer bars are cut off there, with their length in numbers


def draw(study: StudyData, entries: Entries) -> Figure:
    """Stacked medians per arm, the baseline left out, and a mark where its bound lies."""
    longest = max(entry["prompt_tokens"] for entry in entries)
    own = [entry for entry in entries if entry["prompt_tokens"] == longest and _reuses(entry)]
    own = own or [entry for entry in entries if entry["prompt_tokens"] == longest]
    figure, [[ax]] = look.framed(
        study,
        f"Where the time to the first token goes, prompts of {longest:,.0f} tokens",
        height=1.9 + 0.3 * len(own),
        margins=look.Margins(left=0.35 + 0.075 * max(len(name_of(entry)) for entry in own), right=2.25),
    )
    unit = scales.time_unit(_CUT * statistics.median(_total(entry) for entry in own))
    _draw_bars(ax, own, unit.factor)
    _cut_longest(ax, [_total(entry) * unit.factor for entry in own], unit.name)
    ax.set_yticks(range(len(own)), [name_of(entry) for entry in own])
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    look.label(ax, f"TTFT of warm requests, medians of its parts ({unit.name})")
    look.legend_right(ax)
    return figure


def _reuses(entry: dict[str, float]) -> bool:
    """Half of the prompt at least; bars of what is computed again would hide the others."""
    return entry["token_hit_rate"] >= 0.5


def _total(entry: dict[str, dict[str, float]]) -> float:
    return sum(entry["parts_s"].values())


def _draw_bars(ax: Axes, own: Entries, factor: float) -> None:
    left = [0.0] * len(own)
    for part, (colour, name) in PARTS.items():
        widths = [entry["parts_s"][part] * factor for entry in own]
        ax.barh(range(len(own)), widths, left=left, height=0.62, color=colour, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    bounds = [entry["bound_s"] * factor for entry in own]
    ax.plot(bounds, range(len(own)), "|", color=look.INK, markersize=13, markeredgewidth=1.8, label="bound")


def _cut_longest(ax: Axes, totals: list[float], unit: str) -> None:
    """Let a few long bars run out of the frame, so that the parts of the others can be seen."""
    limit = _CUT * statistics.median(totals)
    if max(totals) <= limit:
        return
    ax.set_xlim(0, limit)
    for place, total in enumerate(totals):
        if total > limit:
            words = f"{units.significant(total)} {unit} →"
            ax.text(0.99 * limit, place, words, ha="right", va="center", fontsize=look.TICK_PT, color="white")

"""Parts of the time to first token at the longest prompt."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from spanlab.report import units
from spanlab.report.drawing import scales, style
from spanlab.report.prefill.data import Entry, PrefillData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colour and name of every part, in the order of execution in a step.
PARTS = {
    "plan_s": ("#332288", "planning"),
    "copy_s": ("#ee7733", "copying and rotating"),
    "fill_s": ("#56b4e9", "spans computed alone"),
    "repair_s": ("#999933", "repair"),
    "prefill_s": ("#117733", "ordered text and first token"),
    "other_s": ("#bbbbbb", "rest"),
}
_CUT = 4  # times the median: longer bars end there, with their length as a number


def draw(data: PrefillData) -> Figure | None:
    """Draw stacked medians of requests that reuse at least half of their prompt, and a mark at their bound."""
    longest = data.lengths()[-1]
    entries = [
        entry for entry in data.entries if entry["prompt_tokens"] == longest and entry["parts_s"] and _reuses(entry)
    ]
    if not entries:
        return None
    names = [f"{entry['arm']}: {data.name(entry)}" for entry in entries]
    figure, [[ax]] = style.framed_with(
        data.footer,
        f"Parts of the time to first token, prompts of {longest:,.0f} tokens",
        height=1.9 + 0.3 * len(entries),
        margins=style.Margins(left=0.35 + 0.075 * max(map(len, names)), right=2.25),
    )
    totals = [sum(entry["parts_s"].values()) for entry in entries]
    unit = scales.time_unit(_CUT * statistics.median(totals))
    _draw_bars(ax, entries, unit.factor)
    _cut_longest(ax, [total * unit.factor for total in totals], unit.name)
    ax.set_yticks(range(len(entries)), names)
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    style.label(ax, f"TTFT, medians of its parts ({unit.name})")
    style.legend_right(ax)
    return figure


def _reuses(entry: Entry) -> bool:
    """Whether at least half of the prompt is reused; the long bars of other entries would hide these."""
    return bool(entry["token_hit_rate"] >= 0.5)


def _draw_bars(ax: Axes, entries: list[Entry], factor: float) -> None:
    starts = [0.0] * len(entries)
    for key, (colour, name) in PARTS.items():
        widths = [entry["parts_s"][key] * factor for entry in entries]
        if any(widths):
            ax.barh(range(len(entries)), widths, left=starts, height=0.62, color=colour, label=name)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    bounds = [entry["bound_s"] * factor for entry in entries]
    ax.plot(bounds, range(len(entries)), "|", color=style.INK, markersize=13, markeredgewidth=1.8, label="bound")


def _cut_longest(ax: Axes, totals: list[float], unit: str) -> None:
    """Clip bars above the limit, so that the parts of shorter bars stay visible."""
    limit = _CUT * statistics.median(totals)
    if max(totals) <= limit:
        return
    ax.set_xlim(0, limit)
    for row, total in enumerate(totals):
        if total > limit:
            text = f"{units.significant(total)} {unit} →"
            ax.text(0.99 * limit, row, text, ha="right", va="center", fontsize=style.TICK_PT, color="white")

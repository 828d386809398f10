"""What captures cost, by how many states they are."""

from __future__ import annotations

from collections import Counter

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spanlab.checkpoint_bench.figures.lengths import Entries, of_length, states_axis
from spanlab.checkpoint_bench.summary import FEW_STATES, MOST_OVERHEAD
from spanlab.report import look
from spanlab.report.data import StudyData

_COLS = 3
_FILLS = ("full", "none", "left", "right")  # arms of one family, in their order


def draw(study: StudyData, summary: dict[str, Entries]) -> Figure | None:
    """One plot per length: an arm's cold prefill over the one beside it without captures; band: two of the latter."""
    captures = summary["captures"]
    if not captures:
        return None
    lengths = sorted({entry["length"] for entry in captures})
    cols = 2 if len(lengths) == 4 else min(len(lengths), _COLS)  # no plot alone in a row
    rows = -(-len(lengths) // cols)
    figure, axes = look.framed(
        study,
        "Capture overhead: cold prefill with captures ÷ without − 1 (median, quartiles)",
        rows,
        cols,
        height=1.5 + 2.3 * rows,
        share=("all", "all"),
        margins=look.Margins(left=0.75, right=1.75, top=0.66),
        hspace=0.32,
        wspace=0.1,
    )
    flat = [ax for row in axes for ax in row]
    for ax, length in zip(flat, lengths, strict=False):
        _draw_length(ax, summary, length)
        ax.set_title(f"{length:,} tokens", fontsize=9, loc="left", color=look.INK, pad=3)
        states_axis(ax, (entry["states"] for entry in captures))
    for place, ax in enumerate(flat[len(lengths) :], len(lengths)):
        ax.set_axis_off()
        flat[place - cols].tick_params(labelbottom=True)
    _label(figure, flat[0], [entry["arm"] for entry in captures])
    return figure


def _label(figure: Figure, ax: Axes, arms: list[str]) -> None:
    figure.supylabel("capture overhead (% of the cold prefill)", fontsize=look.LABEL_PT, color=look.INK, x=0.01)
    bottom = 0.42 / figure.get_figheight()
    figure.supxlabel("states captured in the prefill", fontsize=look.LABEL_PT, color=look.INK, y=bottom)
    handles = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    names = [*dict.fromkeys(arms), *(label for label in handles if label not in arms)]
    place = 1 - 1.68 / look.WIDTH_IN, 1 - 0.6 / figure.get_figheight()
    keys = [handles[name] for name in names]
    figure.legend(keys, names, loc="upper left", bbox_to_anchor=place, fontsize=8, frameon=False)


def _draw_length(ax: Axes, summary: dict[str, Entries], length: int) -> None:
    own = of_length(summary["captures"], length)
    (noise,) = of_length(summary["noise"], length)
    if noise["apart"]:
        half = 100 * noise["apart"]["p50"]
        ax.axhspan(-half, half, color=look.FAINT, alpha=0.6, linewidth=0, label="two without captures")
    goal = 100 * MOST_OVERHEAD
    ax.plot([0, FEW_STATES], [goal, goal], color="#cc3311", linewidth=1.2, label=f"goal, to {FEW_STATES} states")
    floor = sorted((entry["states"], 100 * entry["floor"]) for entry in own)
    ax.plot(*zip(*floor, strict=True), color=look.INK, linestyle=(0, (5, 2)), linewidth=1, label="copying alone")
    seen: Counter[str] = Counter()
    for entry in own:
        colour, marker = look.family_look(entry["family"])
        fill = _FILLS[seen[entry["family"]] % len(_FILLS)]
        seen[entry["family"]] += 1
        low, middle, high = (100 * entry["overhead"][point] for point in ("p25", "p50", "p75"))
        ax.errorbar(
            entry["states"],
            middle,
            np.array([[middle - low], [high - middle]]),
            fmt=marker,
            fillstyle=fill,
            color=colour,
            markersize=5,
            elinewidth=0.9,
            label=entry["arm"],
        )

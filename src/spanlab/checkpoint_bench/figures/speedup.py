"""Speedups by strategy and length beside their bounds: one small plot per arm."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from spanlab.checkpoint_bench.figures.lengths import Entries
from spanlab.report import look, scales
from spanlab.report.data import StudyData

_COLS = 4
_DOTS = (0, (1.5, 1.2))
_LINES = ("-", (0, (4, 1.5)), (0, (2, 1)), (0, (6, 1.5, 1.5, 1.5)))


def draw(study: StudyData, summary: dict[str, Entries]) -> Figure | None:
    """Measured speedup over a cold prefill (median, quartiles) by depth, and bound over bound (dotted)."""
    entries = last(summary["again"])
    if not entries:
        return None
    arms = list(dict.fromkeys(entry["arm"] for entry in entries))
    rows = -(-len(arms) // _COLS)
    figure, axes = look.framed(
        study,
        "Speedup of prefill from each strategy's checkpoints, and the ratio of its bounds (dotted)",
        rows,
        _COLS,
        height=1.75 + 1.75 * rows,
        share=("all", "all"),
        margins=look.Margins(top=0.9),
        hspace=0.35,
        wspace=0.12,
    )
    flat = [ax for row in axes for ax in row]
    shares = sorted({_share(entry) for entry in entries})
    for ax, arm in zip(flat, arms, strict=False):
        _draw_arm(ax, [entry for entry in entries if entry["arm"] == arm], shares)
        ax.set_title(arm, fontsize=8, loc="left", color=look.INK, pad=3)
    for place, ax in enumerate(flat[len(arms) :], len(arms)):
        ax.set_axis_off()
        flat[place - _COLS].tick_params(labelbottom=place >= _COLS)
    _scale(flat[0], entries)
    figure.supylabel("speedup of prefill (×)", fontsize=look.LABEL_PT, color=look.INK, x=0.01)
    figure.supxlabel("prompt length (tokens)", fontsize=look.LABEL_PT, color=look.INK, y=0.42 / figure.get_figheight())
    _legend(figure, shares)
    return figure


def last(entries: Entries) -> Entries:
    """The last visit to every depth: what a strategy comes to once it has seen it."""
    kept = {(entry["arm"], entry["length"], entry["shared"]): entry for entry in entries}
    return list(kept.values())


def _share(entry: dict[str, float]) -> int:
    """Shared percent of the prompt."""
    return round(100 * entry["shared"] / entry["length"])


def _draw_arm(ax: Axes, own: Entries, shares: list[int]) -> None:
    ax.axhline(1, color="#999999", linewidth=0.6)
    for place, share in enumerate(shares):
        curve = sorted((entry for entry in own if _share(entry) == share), key=lambda entry: entry["length"])
        lengths = [entry["length"] for entry in curve]
        low, median, high = ([entry["speedup"][point] for entry in curve] for point in ("p25", "p50", "p75"))
        colour, marker = look.family_look(own[0]["family"])
        ax.plot(lengths, [entry["bound_speedup"] for entry in curve], color=look.INK, linewidth=0.9, linestyle=_DOTS)
        ax.fill_between(lengths, low, high, color=colour, alpha=0.2, linewidth=0)
        line = _LINES[place % len(_LINES)]
        ax.plot(lengths, median, color=colour, marker=marker, markersize=4, linewidth=1.3, linestyle=line)


def _scale(ax: Axes, entries: Entries) -> None:
    lengths = [entry["length"] for entry in entries]
    factors = [value for entry in entries for value in (entry["bound_speedup"], *_quartiles(entry))]
    scales.log_scale(ax.xaxis, min(lengths), 1e3 * max(lengths))  # small plots have room for few ticks
    scales.log_scale(ax.yaxis, min(factors), max(factors))
    ax.set_xlim(min(lengths) / 1.3, max(lengths) * 1.3)
    ax.set_ylim(min(factors) / 1.3, max(factors) * 1.3)


def _quartiles(entry: dict[str, dict[str, float]]) -> tuple[float, float]:
    return entry["speedup"]["p25"], entry["speedup"]["p75"]


def _legend(figure: Figure, shares: list[int]) -> None:
    keys = [
        Line2D([], [], color=look.INK, linewidth=1.3, linestyle=_LINES[place % len(_LINES)])
        for place in range(len(shares))
    ]
    top = 1 - 0.3 / figure.get_figheight()
    labels = [f"{share} % shared" for share in shares]
    figure.legend(keys, labels, loc="upper left", bbox_to_anchor=(0.07, top), ncols=8, fontsize=8, frameon=False)

"""Speedups beside the ratios of bounds, by prompt length: one small plot per arm."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spanlab.pic_bench.figures.curves import Entries, curves, strokes
from spanlab.report import look, scales
from spanlab.report.data import StudyData

_COLS = 4
_DOTS = (0, (1.5, 1.2))


def draw(study: StudyData, entries: Entries) -> Figure:
    """Measured speedup of TTFT (median, quartiles) and the ratio of both bounds (dotted).

    Each TTFT has a bound; their ratio is none, and a baseline far from its own bound exceeds it.
    """
    found = curves([entry for entry in entries if not _is_baseline(entry)]) or curves(entries)
    rows = -(-len(found) // _COLS)
    figure, axes = look.framed(
        study,
        "Speedup of TTFT over a cold start (solid), and the ratio of both bounds (dotted)",
        rows,
        _COLS,
        height=1.4 + 1.75 * rows,
        share=("all", "all"),
        margins=look.Margins(top=0.66),
        hspace=0.42,
        wspace=0.12,
    )
    flat = [ax for row in axes for ax in row]
    drawn = strokes(found)
    for ax, (name, own) in zip(flat, found.items(), strict=False):
        _draw_arm(ax, name, own, drawn[name])
    for place, ax in enumerate(flat[len(found) :], len(found)):
        ax.set_axis_off()
        flat[place - _COLS].tick_params(labelbottom=place >= _COLS)
    _scale(flat, entries)
    figure.supylabel("speedup of TTFT (×)", fontsize=look.LABEL_PT, color=look.INK, x=0.01)
    figure.supxlabel("prompt length (tokens)", fontsize=look.LABEL_PT, color=look.INK, y=0.4 / figure.get_figheight())
    return figure


def _is_baseline(entry: dict[str, object]) -> bool:
    return entry["family"] == "none"


def _draw_arm(ax: Axes, name: str, own: Entries, stroke: look.Stroke) -> None:
    lengths = [entry["prompt_tokens"] for entry in own]
    low, median, high = ([entry["speedup"][point] for entry in own] for point in ("p25", "p50", "p75"))
    bound = [entry["bound_speedup"] for entry in own]
    ax.plot(lengths, bound, color=look.INK, linewidth=1.0, linestyle=_DOTS)
    ax.fill_between(lengths, low, high, color=stroke.colour, alpha=0.2, linewidth=0)
    ax.plot(lengths, median, color=stroke.colour, marker=stroke.marker, markersize=4, linewidth=1.3)
    ax.axhline(1, color="#999999", linewidth=0.6)
    ax.set_title(name.replace(", ", "\n"), fontsize=8, loc="left", color=look.INK, pad=3)


def _scale(axes: list[Axes], entries: Entries) -> None:
    lengths = [entry["prompt_tokens"] for entry in entries]
    factors = [value for entry in entries for value in (entry["bound_speedup"], *_quartiles(entry))]
    scales.log_scale(axes[0].xaxis, min(lengths), 1e3 * max(lengths))  # small plots have room for few ticks
    scales.log_scale(axes[0].yaxis, min(factors), max(factors))
    axes[0].set_xlim(min(lengths) / 1.3, max(lengths) * 1.3)
    axes[0].set_ylim(min(factors) / 1.3, max(factors) * 1.3)


def _quartiles(entry: dict[str, dict[str, float]]) -> tuple[float, float]:
    return entry["speedup"]["p25"], entry["speedup"]["p75"]

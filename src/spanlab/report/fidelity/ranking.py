"""Arms ranked by mean time to first token, measured and simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanlab.analysis.compare import ArmComparison, by_load, mean_ttft
from spanlab.analysis.goals import load_words
from spanlab.report.drawing import scales, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(comparisons: list[ArmComparison], footer: str) -> Figure | None:
    """Draw a panel per load, arms in the order of the engine's means; hollow: simulated, bars: range of repeats."""
    if not comparisons:
        return None
    loads, drawn = (
        by_load(comparisons),
        style.strokes({comparison.arm: comparison.family for comparison in comparisons}.items()),
    )
    unit = scales.time_unit(max(max(*mean_ttft(comparison)[0], mean_ttft(comparison)[1]) for comparison in comparisons))
    figure, rows = style.framed_with(
        footer,
        "Arms by mean TTFT: measured (filled, bars over repeats) and simulated (hollow)",
        len(loads),
        1,
        height=1.9 + len(loads) * (0.45 + 0.24 * len(drawn)),
        share=("all", "none"),
        margins=style.Margins(left=0.35 + 0.075 * max(map(len, drawn)), top=0.72, bottom=1.25),
        hspace=0.32,
    )
    for [ax], load in zip(rows, loads, strict=True):
        _draw_load(ax, load, drawn, unit.factor)
        ax.set_title(load_words(load[0].share, load[0].rate_rps), fontsize=9, loc="left", color=style.INK)
        ax.tick_params(labelbottom=ax is rows[-1][0])
    times = [
        value * unit.factor
        for comparison in comparisons
        for value in (*mean_ttft(comparison)[0], mean_ttft(comparison)[1])
    ]
    scales.log_scale(rows[-1][0].xaxis, min(times), max(times))
    rows[-1][0].set_xlim(min(times) / 1.2, max(times) * 1.2)
    style.label(rows[-1][0], f"mean TTFT ({unit.name})")
    return figure


def _draw_load(ax: Axes, load: list[ArmComparison], drawn: dict[str, style.Stroke], factor: float) -> None:
    means = {comparison.arm: mean_ttft(comparison) for comparison in load}
    order = sorted(means, key=lambda arm: sum(means[arm][0]) / len(means[arm][0]))
    for row, arm in enumerate(order):
        repeats, predicted = means[arm]
        stroke = drawn[arm]
        middle = sum(repeats) / len(repeats)
        ax.plot([min(repeats) * factor, max(repeats) * factor], [row, row], color=stroke.colour, linewidth=2.5)
        ax.plot(middle * factor, row, stroke.marker, color=stroke.colour, markersize=6)
        ax.plot(
            predicted * factor,
            row,
            "o",
            markerfacecolor="none",
            markeredgecolor=style.INK,
            markersize=9,
            markeredgewidth=1.0,
        )
    ax.set_yticks(range(len(order)), order)
    ax.set_ylim(len(order) - 0.5, -0.5)
    ax.grid(False, axis="y")

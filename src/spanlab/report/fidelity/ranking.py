"""Arms by mean time to first token, measured and simulated: would one have chosen the same?"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spanlab.analysis.compare import Compared, by_load, mean_ttft
from spanlab.analysis.goals import load_words
from spanlab.report.drawing import scales, style


def draw(found: list[Compared], footer: str) -> Figure | None:
    """A panel per load, arms in the order of the engine's means; hollow: simulated, bars: from repeat to repeat."""
    if not found:
        return None
    loads, drawn = by_load(found), style.strokes({one.arm: one.family for one in found}.items())
    unit = scales.time_unit(max(max(*mean_ttft(one)[0], mean_ttft(one)[1]) for one in found))
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
    for [ax], own in zip(rows, loads, strict=True):
        _draw_load(ax, own, drawn, unit.factor)
        ax.set_title(load_words(own[0].share, own[0].rate_rps), fontsize=9, loc="left", color=style.INK)
        ax.tick_params(labelbottom=ax is rows[-1][0])
    times = [value * unit.factor for one in found for value in (*mean_ttft(one)[0], mean_ttft(one)[1])]
    scales.log_scale(rows[-1][0].xaxis, min(times), max(times))
    rows[-1][0].set_xlim(min(times) / 1.2, max(times) * 1.2)
    style.label(rows[-1][0], f"mean TTFT ({unit.name})")
    return figure


def _draw_load(ax: Axes, own: list[Compared], drawn: dict[str, style.Stroke], factor: float) -> None:
    means = {one.arm: mean_ttft(one) for one in own}
    order = sorted(means, key=lambda arm: sum(means[arm][0]) / len(means[arm][0]))
    for place, arm in enumerate(order):
        repeats, predicted = means[arm]
        stroke = drawn[arm]
        middle = sum(repeats) / len(repeats)
        ax.plot([min(repeats) * factor, max(repeats) * factor], [place, place], color=stroke.colour, linewidth=2.5)
        ax.plot(middle * factor, place, stroke.marker, color=stroke.colour, markersize=6)
        ax.plot(
            predicted * factor,
            place,
            "o",
            markerfacecolor="none",
            markeredgecolor=style.INK,
            markersize=9,
            markeredgewidth=1.0,
        )
    ax.set_yticks(range(len(order)), order)
    ax.set_ylim(len(order) - 0.5, -0.5)
    ax.grid(False, axis="y")

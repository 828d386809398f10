"""The figure of the analysis `decay`: speedup and hit rate of known requests over the number of novel ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from spanlab.analysis.decay import LEAST_SPEEDUP, Decay
from spanlab.report.drawing import style
from spanlab.stats import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_decay(arms: Mapping[str, Decay], families: Mapping[str, str], baseline: str, footer: str) -> Figure:
    """Draw one line per arm with its interval over seeds; windows are drawn at their middles, the first at 0.

    The axes end at twice the largest mean, so wider intervals are clipped.
    """
    title = "Speedup of known requests while novel ones arrive"
    margins = style.Margins(top=1.35)
    scored = any(decay.change for decay in arms.values())
    figure, [[speedup, reused, *loss]] = style.framed_with(
        footer, title, cols=2 + scored, height=5.6, margins=margins, wspace=0.25 + 0.05 * scored
    )
    strokes = style.strokes((name, families[name]) for name in arms if name != baseline)
    for name, stroke in strokes.items():
        decay = arms[name]
        middles = _middles(decay.novel)
        _line(speedup, middles, decay.speedup, stroke, name, 1)
        _line(reused, middles, decay.reused, stroke, name, 100)
        for axes in loss:
            _line(axes, middles, decay.change, stroke, name, 1)
    speedup.axhline(1, color=style.INK, linewidth=1)
    speedup.axhline(LEAST_SPEEDUP, color=style.INK, linewidth=0.8, linestyle=(0, (1, 2)))
    style.label(speedup, "novel requests so far", f"TTFT of {baseline} ÷ TTFT (mean, known requests)")
    style.label(reused, "novel requests so far", "token hit rate, known requests (%)")
    for axes in loss:
        axes.axhline(0, color=style.INK, linewidth=1)
        style.label(axes, "novel requests so far", f"gold loss − that of {baseline} (nats, known requests)")
    shown = [decay for name, decay in arms.items() if name in strokes]
    speedup.set_ylim(0, _reach(decay.speedup for decay in shown))
    reused.set_ylim(0, 100)
    for axes in loss:
        reach = _reach(decay.change for decay in shown)
        axes.set_ylim(-reach, reach)
    handles, _ = speedup.get_legend_handles_labels()
    anchor = 0.03, 1 - 0.35 / figure.get_figheight()
    options = {"fontsize": style.TICK_PT, "frameon": False, "ncols": 3, "handlelength": 3.5}
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=anchor, **options)
    return figure


def _reach(lines: Iterable[Sequence[Interval]]) -> float:
    """Return twice the largest mean as axis limit: the wide intervals of few seeds would flatten the lines."""
    return 2 * max(abs(value.mean) for values in lines for value in values) or 1.0


def _middles(novel: Sequence[float]) -> list[float]:
    return [0.0, *((start + end) / 2 for start, end in pairwise(novel))]


def _line(
    axes: Axes, positions: list[float], values: Sequence[Interval], stroke: style.Stroke, name: str, factor: int
) -> None:
    """Draw a line of means with a band between the ends of their intervals."""
    means = [factor * value.mean for value in values]
    axes.plot(positions, means, label=name, markersize=4, linewidth=1.5, **stroke.options)
    lows = [factor * (value.mean if value.low is None else value.low) for value in values]
    highs = [factor * (value.mean if value.high is None else value.high) for value in values]
    axes.fill_between(positions, lows, highs, color=stroke.colour, alpha=0.1, linewidth=0)

"""Every request's time to first token, predicted against measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from spanlab.analysis.compare import ArmComparison, by_load
from spanlab.analysis.goals import load_words
from spanlab.report.drawing import scales, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ONE_TENTH = 0.1


def draw(comparisons: list[ArmComparison], footer: str) -> Figure | None:
    """Draw one point per request and repeat, a panel per load, with a line of equality and a ±10 % band."""
    if not comparisons:
        return None
    loads, drawn = (
        by_load(comparisons),
        style.strokes({comparison.arm: comparison.family for comparison in comparisons}.items()),
    )
    figure, [axes] = style.framed_with(
        footer,
        "Time to first token of every request: simulated against measured",
        1,
        len(loads),
        height=4.5 if len(loads) > 1 else style.HEIGHT_IN,
        share=("all", "all"),
        margins=style.Margins(top=0.72, right=0.75 + 0.072 * max(map(len, drawn)), bottom=1.35),
        wspace=0.1,
    )
    values = np.concatenate(
        [
            v
            for comparison in comparisons
            for v in (*(run["ttft_s"] for run in comparison.measured), comparison.predicted["ttft_s"])
        ]
    )
    unit = scales.time_unit(float(values.max()))
    low, high = (value * unit.factor for value in scales.positive_range(values))
    for ax, load in zip(axes, loads, strict=True):
        _draw_load(ax, load, drawn, unit.factor, (low / 1.3, high * 1.3))
        ax.set_title(load_words(load[0].share, load[0].rate_rps), fontsize=9, loc="left", color=style.INK)
    style.label(axes[0], "", f"simulated TTFT ({unit.name})")
    middle = (0.8 + style.WIDTH_IN - 0.75 - 0.072 * max(map(len, drawn))) / 2 / style.WIDTH_IN
    label = f"measured TTFT ({unit.name})"
    figure.supxlabel(label, fontsize=style.LABEL_PT, color=style.INK, x=middle, y=0.85 / figure.get_figheight())
    style.legend_right(axes[-1])
    return figure


def _draw_load(
    ax: Axes, load: list[ArmComparison], drawn: dict[str, style.Stroke], factor: float, limits: tuple[float, float]
) -> None:
    line = np.array(limits)
    ax.plot(line, line, color=style.INK, linewidth=0.8, zorder=1, label="equal")
    band = line * (1 - _ONE_TENTH), line * (1 + _ONE_TENTH)
    ax.fill_between(line, *band, color=style.FAINT, alpha=0.6, zorder=0, label=f"±{100 * _ONE_TENTH:g} %")
    for comparison in load:
        measured = np.concatenate([run["ttft_s"] for run in comparison.measured]) * factor
        predicted = np.tile(comparison.predicted["ttft_s"], len(comparison.measured)) * factor
        stroke = drawn[comparison.arm]
        ax.scatter(
            measured,
            predicted,
            s=11,
            marker=stroke.marker,
            color=stroke.colour,
            alpha=0.55,
            linewidths=0,
            label=comparison.arm,
        )
    for axis in (ax.xaxis, ax.yaxis):
        scales.log_scale(axis, *limits)
    ax.set_xlim(limits)
    ax.set_ylim(limits)

"""Every request's time to first token, predicted against measured."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spanlab.analysis.compare import Compared, by_load
from spanlab.analysis.goals import load_words
from spanlab.report.drawing import scales, style

_ONE_TENTH = 0.1


def draw(found: list[Compared], footer: str) -> Figure | None:
    """One point per request and repeat, a panel per load; on the line both agree, in the band to 10 %."""
    if not found:
        return None
    loads, drawn = by_load(found), style.strokes({one.arm: one.family for one in found}.items())
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
        [v for one in found for v in (*(run["ttft_s"] for run in one.measured), one.predicted["ttft_s"])]
    )
    unit = scales.time_unit(float(values.max()))
    low, high = (value * unit.factor for value in scales.positive_range(values))
    for ax, own in zip(axes, loads, strict=True):
        _draw_load(ax, own, drawn, unit.factor, (low / 1.3, high * 1.3))
        ax.set_title(load_words(own[0].share, own[0].rate_rps), fontsize=9, loc="left", color=style.INK)
    style.label(axes[0], "", f"simulated TTFT ({unit.name})")
    middle = (0.8 + style.WIDTH_IN - 0.75 - 0.072 * max(map(len, drawn))) / 2 / style.WIDTH_IN
    words = f"measured TTFT ({unit.name})"
    figure.supxlabel(words, fontsize=style.LABEL_PT, color=style.INK, x=middle, y=0.85 / figure.get_figheight())
    style.legend_right(axes[-1])
    return figure


def _draw_load(
    ax: Axes, own: list[Compared], drawn: dict[str, style.Stroke], factor: float, limits: tuple[float, float]
) -> None:
    line = np.array(limits)
    ax.plot(line, line, color=style.INK, linewidth=0.8, zorder=1, label="equal")
    band = line * (1 - _ONE_TENTH), line * (1 + _ONE_TENTH)
    ax.fill_between(line, *band, color=style.FAINT, alpha=0.6, zorder=0, label=f"±{100 * _ONE_TENTH:g} %")
    for one in own:
        measured = np.concatenate([run["ttft_s"] for run in one.measured]) * factor
        predicted = np.tile(one.predicted["ttft_s"], len(one.measured)) * factor
        stroke = drawn[one.arm]
        ax.scatter(
            measured,
            predicted,
            s=11,
            marker=stroke.marker,
            color=stroke.colour,
            alpha=0.55,
            linewidths=0,
            label=one.arm,
        )
    for axis in (ax.xaxis, ax.yaxis):
        scales.log_scale(axis, *limits)
    ax.set_xlim(limits)
    ax.set_ylim(limits)

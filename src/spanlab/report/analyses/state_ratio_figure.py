"""The figure of the analysis `state_ratio`: token hit rate over the ratio of two pools, and with one budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spanlab.report.analyses.state_ratio import RatioCurves
from spanlab.report.drawing import scales, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLS = 3
_STROKES = (("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#cc79a7", "D"))
_MARKS = {"default": ("SGLang's default", (0, (1, 1.5))), "formula": ("SGLang's formula", (0, (5, 2)))}


def draw_ratios(panels: Sequence[RatioCurves], footer: str) -> Figure:
    """Draw a panel per model and workload; markers at its right end are hit rates with one budget."""
    title = "Token hit rate by the split of memory; diamonds: one budget for states and KV"
    margins = style.Margins(top=0.95, bottom=0.95)
    figure, axes = style.panels(
        footer, title, len(panels), _COLS, (1.6, 2.45), margins=margins, share=("none", "all"), hspace=0.5
    )
    arms = list(panels[0].curves)
    for ax, panel in zip(axes, panels, strict=True):
        _draw_panel(ax, panel, arms)
    for ax in axes[::_COLS]:
        ax.set_ylabel("reused (%)", fontsize=style.LABEL_PT)
    _legend(figure, arms)
    return figure


def _draw_panel(ax: Axes, panel: RatioCurves, arms: Sequence[str]) -> None:
    ratios = list(panel.curves[arms[0]])
    common_x = ratios[-1] * 2
    for arm, (colour, marker) in zip(arms, _STROKES, strict=False):
        rates = list(panel.curves[arm].values())
        y = [100 * rate.mean for rate in rates]
        ends = [rate.ends or (rate.mean, rate.mean) for rate in rates]
        reach = [[100 * abs(end[side] - rate.mean) for end, rate in zip(ends, rates, strict=True)] for side in (0, 1)]
        ax.errorbar(ratios, y, yerr=reach, color=colour, marker=marker, markersize=4, linewidth=1.3, elinewidth=0.7)
        if arm in panel.common:
            ax.plot([common_x], [100 * panel.common[arm].mean], color=colour, marker="D", markersize=6, clip_on=False)
    for name, (_, dash) in _MARKS.items():
        ax.axvline(getattr(panel, name), color=style.INK, linewidth=0.9, linestyle=dash, zorder=0)
    scales.log_scale(ax.xaxis, ratios[0], common_x)
    ticks = [tick for tick in ax.get_xticks() if ratios[0] <= tick <= ratios[-1]]
    ax.set_xticks([*ticks, common_x], [*(f"{tick:g}" for tick in ticks), "one"])
    ax.set_ylim(0, 100)
    ax.set_title(panel.panel.replace("_", " "), fontsize=style.TICK_PT, color=style.INK, loc="left")
    ax.set_xlabel("states ÷ KV (bytes)", fontsize=style.TICK_PT)


def _legend(figure: Figure, arms: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], color=colour, marker=marker, markersize=4, label=arm)
        for arm, (colour, marker) in zip(arms, _STROKES, strict=False)
    ]
    lines += [Line2D([], [], color=style.INK, linestyle=dash, label=name) for name, dash in _MARKS.values()]
    top = 1 - 0.33 / figure.get_figheight()
    figure.legend(handles=lines, loc="upper left", bbox_to_anchor=(0.01, top), ncols=3, fontsize=8, frameon=False)

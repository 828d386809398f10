"""The figure of the analysis `perfect_eviction`: hits above, TTFT below, over the budget, one column per workload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spanlab.report.analyses.perfect_eviction import ARM_LABELS
from spanlab.report.drawing import style
from spanlab.report.drawing.scales import log_scale
from spanlab.report.sweep.data import SweepPoint, axis_name, footer_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STROKES = {"usual": ("#222222", "o"), "best": ("#0072b2", "s"), "known": ("#d55e00", "^")}
_BOUND: dict[str, Any] = {"color": "#7f7f7f", "linestyle": "--"}
_HEIGHT_IN = 5.6
_TOP_IN, _LEGEND_IN = 0.85, 0.3  # distances of the panels and of their legend from the top


def draw_perfect_eviction(points: Sequence[SweepPoint]) -> Figure | None:
    """Draw the last setting on the x axis and a panel per value of the others; None where it is not numeric."""
    panels: dict[str, list[SweepPoint]] = {}
    *_, last = points[0].settings
    for point in points:
        name = " ".join(value for key, value in point.settings.items() if key != last) or axis_name(last)
        panels.setdefault(name, []).append(point)
    if not all(_is_number(point.settings[last]) for point in points):
        return None
    title = "Gain of perfect eviction"
    margins = style.Margins(top=_TOP_IN)
    figure, [hits, ttft] = style.framed_with(
        footer_of(points), title, 2, len(panels), height=_HEIGHT_IN, margins=margins, hspace=0.16, wspace=0.3
    )
    for upper, lower, (name, group) in zip(hits, ttft, panels.items(), strict=True):
        upper.set_title(name, fontsize=style.TICK_PT, loc="left", pad=3, color=style.INK)
        _panel(upper, group, last, "token_hit_rate", "bound", 100)
        _panel(lower, group, last, "ttft_mean_s", "least_s", 1000)
        upper.set_ylim(0, 100)
        upper.tick_params(labelbottom=False)
        log_scale(lower.yaxis, *lower.dataLim.intervaly)
        style.label(lower, axis_name(last))
    style.label(hits[0], "", "token hit rate (%)")
    style.label(ttft[0], axis_name(last), "mean TTFT (ms)")
    anchor = 0.01, 1 - _LEGEND_IN / figure.get_figheight()
    options = {"ncols": 4, "fontsize": style.NOTE_PT, "frameon": False}
    figure.legend(handles=hits[0].get_lines(), loc="upper left", bbox_to_anchor=anchor, **options)
    return figure


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _panel(axes: Axes, points: Sequence[SweepPoint], key: str, measure: str, bound: str, factor: float) -> None:
    """Draw one measure of the three arms, and its bound, over the last setting."""
    positions = [float(point.settings[key]) for point in points]
    for arm, (colour, marker) in _STROKES.items():
        values = [point.findings("perfect_eviction")[arm][measure] for point in points]
        shown = [(x, factor * value) for x, value in zip(positions, values, strict=True) if value is not None]
        names = {point.findings("perfect_eviction")[arm]["arm"] for point in points}
        label = f"{ARM_LABELS[arm]} ({names.pop()})" if len(names) == 1 else ARM_LABELS[arm]
        axes.plot([x for x, _ in shown], [y for _, y in shown], color=colour, marker=marker, label=label)
    limits = [point.findings("perfect_eviction")[bound] for point in points]
    if None not in limits:
        axes.plot(positions, [factor * limit for limit in limits], label="bound", **_BOUND)
    axes.set_xscale("log")
    axes.set_xticks(positions, [f"{x:g}" for x in positions])
    axes.set_xticks([], minor=True)

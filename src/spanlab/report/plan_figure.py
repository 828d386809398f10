"""Figures of the analysis `plan`: latencies by the setting that a search varies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spanlab.report.drawing import style
from spanlab.report.drawing.scales import log_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_search(summary: Mapping[str, Any], name: str, title: str) -> Figure:
    """Draw each target's value with its interval, as a multiple of the target; values above 1 miss the target.

    A single target is drawn in seconds. Open markers: the queue grows.
    """
    search, curve, targets = summary["searches"][name], summary["curves"][name], summary["targets"]
    names = [*targets, *search["marks"], "target", "queue grows"]
    figure, [[ax]] = style.framed_with(title, f"Targets over {name}", margins=style.margins_for(names))
    single = len(targets) == 1
    for number, (key, limit) in enumerate(targets.items()):
        _draw_target(ax, search["axis"]["key"], curve, key, 1.0 if single else limit, f"C{number}")
    ax.axhline(next(iter(targets.values())) if single else 1.0, color=style.INK, linestyle="--", label="target")
    _mark(ax, search["marks"], search["answer"])
    if search["axis"]["logarithmic"]:
        log_scale(ax.xaxis, *ax.get_xlim())
    log_scale(ax.yaxis, *ax.get_ylim())
    style.label(ax, search["axis"]["label"], "seconds" if single else "value ÷ target")
    style.legend_right(ax)
    return figure


def _draw_target(ax: Axes, axis: str, curve: list[Mapping[str, Any]], key: str, unit: float, colour: str) -> None:
    positive = [point for point in curve if point[key]["mean"] > 0]  # a log axis cannot show zero
    ax.plot(
        [point[axis] for point in positive],
        [point[key]["mean"] / unit for point in positive],
        color=colour,
        linewidth=1.2,
        label=key,
    )
    for point in positive:
        low, high = (point[key]["mean"] if point[key][end] is None else point[key][end] for end in ("low", "high"))
        least = point[key]["mean"] / 10  # nor an interval that ends at zero
        ax.plot([point[axis]] * 2, [max(low, least) / unit, high / unit], color=colour, linewidth=1)
        face = "white" if point["queue_grows"] else colour
        ax.plot(point[axis], point[key]["mean"] / unit, color=colour, marker="o", markersize=4, markerfacecolor=face)


def _mark(ax: Axes, marks: Mapping[str, float], answer: float | None) -> None:
    for number, (label, value) in enumerate(marks.items()):
        ax.axvline(value, color="#777777", linestyle=style.LINE_STYLES[1 + number % 3], linewidth=1, label=label)
    if answer is not None:
        ax.axvline(answer, color=style.INK, linewidth=1, label=f"answer: {answer:.4g}")

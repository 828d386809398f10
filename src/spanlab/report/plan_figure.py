"""The figures of the analysis `plan`: targets over what a search varies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spanlab.report.drawing import style
from spanlab.report.drawing.scales import log_scale


def draw_search(summary: Mapping[str, Any], name: str, title: str) -> Figure:
    """Each target's value with its interval, as a multiple of the target; the line at 1 is what must not be exceeded.

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
    known = [one for one in curve if one[key]["mean"] > 0]  # what is zero has no place on a logarithmic axis
    ax.plot(
        [one[axis] for one in known], [one[key]["mean"] / unit for one in known], color=colour, linewidth=1.2, label=key
    )
    for one in known:
        low, high = (one[key]["mean"] if one[key][end] is None else one[key][end] for end in ("low", "high"))
        least = one[key]["mean"] / 10  # an end at zero has no place either
        ax.plot([one[axis]] * 2, [max(low, least) / unit, high / unit], color=colour, linewidth=1)
        face = "white" if one["queue_grows"] else colour
        ax.plot(one[axis], one[key]["mean"] / unit, color=colour, marker="o", markersize=4, markerfacecolor=face)


def _mark(ax: Axes, marks: Mapping[str, float], answer: float | None) -> None:
    for number, (words, value) in enumerate(marks.items()):
        ax.axvline(value, color="#777777", linestyle=style.LINE_STYLES[1 + number % 3], linewidth=1, label=words)
    if answer is not None:
        ax.axvline(answer, color=style.INK, linewidth=1, label=f"answer: {answer:.4g}")

"""The figure of the analysis `twin`: predicted against measured times of requests, and errors over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from spanlab.report.drawing import scales, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = {"ttft": "TTFT", "e2e": "E2E latency"}
PARTS = {"seen by the fit": ("#999999", "o"), "not seen": ("#0072b2", "s")}
BAND = 0.1  # shaded around equality
MOST = 0.5  # larger errors are drawn at this limit


def draw(columns: Mapping[str, Any], title: str) -> Figure:
    """Draw predicted against measured times above, and relative errors by arrival below, one point per request."""
    heading = "Requests of the log: predicted against measured, and relative errors by arrival"
    margins = style.margins_for(PARTS)
    figure, axes = style.framed_with(title, heading, 2, 2, height=7.0, margins=margins, wspace=0.4, hspace=0.3)
    for column, (metric, name) in enumerate(SHOWN.items()):
        predicted, measured = columns["predicted"][metric], columns["measured"][metric]
        _draw_pairs(axes[0][column], columns["trains"], predicted, measured, name)
        _draw_errors(axes[1][column], columns, predicted / measured - 1, name)
    style.legend_right(axes[0][1])
    return figure


def _subsets(trains: Any) -> list[tuple[str, Any]]:
    return list(zip(PARTS, (trains, ~trains), strict=True))


def _draw_pairs(ax: Axes, trains: Any, predicted: Any, measured: Any, name: str) -> None:
    low, high = scales.positive_range(np.concatenate([predicted, measured]))
    ends = np.array([low / 1.3, high * 1.3])
    ax.plot(ends, ends, color=style.INK, linewidth=0.8)
    lower, upper = ends * (1 - BAND), ends * (1 + BAND)
    ax.fill_between(ends, lower, upper, color=style.FAINT, alpha=0.6, zorder=0, label=f"within {BAND:.0%}")
    for label, mask in _subsets(trains):
        colour, marker = PARTS[label]
        ax.scatter(
            measured[mask], predicted[mask], s=9, marker=marker, color=colour, alpha=0.6, linewidths=0, label=label
        )
    for axis in (ax.xaxis, ax.yaxis):
        scales.log_scale(axis, *ends)
    ax.set_xlim(*ends)
    ax.set_ylim(*ends)
    style.label(ax, f"measured {name} (s)", f"predicted {name} (s)")


def _draw_errors(ax: Axes, columns: Mapping[str, Any], errors: Any, name: str) -> None:
    ax.axhspan(-100 * BAND, 100 * BAND, color=style.FAINT, alpha=0.6, zorder=0)
    ax.axhline(0, color=style.INK, linewidth=0.8)
    shown = 100 * np.clip(errors, -MOST, MOST)
    for label, mask in _subsets(columns["trains"]):
        colour, marker = PARTS[label]
        ax.scatter(columns["arrived_s"][mask], shown[mask], s=9, marker=marker, color=colour, alpha=0.6, linewidths=0)
    style.label(ax, "arrival (s)", f"error of {name} (%)")

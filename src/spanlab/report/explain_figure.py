"""The figure of the analysis `explain`: hit rate over memory, with bounds and arms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spanlab.report.drawing import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BOUNDS = {"prefix": "prefix, no limit", "any_position": "seen before, any position", "offline_optimum": "best eviction"}


def draw_curve(summary: Mapping[str, Any], title: str) -> Figure:
    """Draw the LRU hit rate by memory, with horizontal lines for the bounds and for the presets."""
    curve = summary["capacity_curve"]
    names = [*BOUNDS.values(), *summary["presets"]]
    figure, [[ax]] = style.framed_with(title, "Token hit rate by memory for KV", margins=style.margins_for(names))
    sizes, shares = [point["gib"] for point in curve], [100 * point["token_hit_rate"] for point in curve]
    ax.plot(sizes, shares, color=style.INK, marker="o", markersize=3, linewidth=1.3, label="LRU")
    for (key, name), line in zip(BOUNDS.items(), style.LINE_STYLES[1:], strict=True):
        if summary["bounds"][key] is not None:
            ax.axhline(100 * summary["bounds"][key], color="#777777", linestyle=line, linewidth=1, label=name)
    for number, (name, preset) in enumerate(summary["presets"].items()):
        colour = f"C{number}"
        ax.axhline(100 * preset["token_hit_rate"], color=colour, linewidth=0.8, alpha=0.8, label=name)
    ax.set_xscale("log")
    ax.set_ylim(0, 100)
    style.label(ax, "memory for KV (GiB)", "token hit rate (%)")
    style.legend_right(ax)
    return figure

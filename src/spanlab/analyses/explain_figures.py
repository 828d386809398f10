"""Figures of the analysis `explain`: hit rate over memory and over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from spanlab.analyses.fixes import Facts
from spanlab.offline.forest import Ints
from spanlab.offline.replay import ReplayResult
from spanlab.report import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BOUNDS = {"prefix": "prefix, no limit", "any_position": "seen before, any position", "offline_optimum": "best eviction"}
INTERVALS = 60  # of the log's time
_ALIKE = 1.0  # points: lines that are nearer to each other everywhere are drawn once
#: Caches that expire whose hit rate over time is drawn, those with the shortest times first.
EXPIRING = ("anthropic_5m", "anthropic_1h", "openai_24h", "fitted_longest", "ttl")


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


# ------------------------------------------------------------------------------
# Hit rate over the time of the log.
# ------------------------------------------------------------------------------


def over_time(facts: Facts, replayed: ReplayResult, expiring: Mapping[str, Ints]) -> list[dict[str, Any]]:
    """Return hit rates of equal intervals of the log's time, or of its requests if it has no times.

    `expiring`  reused tokens of each prompt by name of a cache that expires
    """
    log, prompt = facts.log, facts.paths.prompt_tokens
    clock = log.arrived_ns if log.arrived_ns.any() else np.arange(log.requests)
    span = max(int(clock[-1] - clock[0]), 1)
    interval = np.minimum((clock - clock[0]) / span * INTERVALS, INTERVALS - 1).astype(np.int64)
    reported = None if log.usage is None else ~np.isnan(log.usage[:, :2]).any(axis=1)

    def by_interval(values: Any) -> Any:
        return np.bincount(interval, values, INTERVALS)

    total = by_interval(prompt)
    sums = {"token_hit_rate": by_interval(replayed.reused), "prefix": by_interval(facts.paths.seen_tokens)}
    sums |= {name: by_interval(reused) for name, reused in expiring.items()}
    counted = np.zeros((INTERVALS, 2))
    if log.usage is not None and reported is not None:
        counted = np.stack([by_interval(np.where(reported, log.usage[:, index], 0)) for index in (0, 1)], axis=1)
    return [
        {
            "at_s": (number + 0.5) * span / INTERVALS * 1e-9 if log.arrived_ns.any() else None,
            "prompt_tokens": int(total[number]),
            **{name: float(values[number] / total[number]) for name, values in sums.items()},
            "reported": float(counted[number, 1] / counted[number, 0]) if counted[number, 0] else None,
        }
        for number in range(INTERVALS)
        if total[number]
    ]


def draw_over_time(summary: Mapping[str, Any], title: str) -> Figure | None:
    """Draw hit rates over time: of the explained arm, of caches that expire, without a limit, and as reported."""
    points = summary["over_time"]
    if len(points) < 2:
        return None
    names = {"token_hit_rate": summary["explained"], "prefix": BOUNDS["prefix"], "reported": "reported by the server"}
    names |= {name: f"expires: {name}" for name in EXPIRING if name in points[0]}
    figure, [[ax]] = style.framed_with(title, "Token hit rate over time", margins=style.margins_for(names.values()))
    is_timed = points[0]["at_s"] is not None
    unit = style.time_unit(points[-1]["at_s"]) if is_timed else None
    places = [point["at_s"] * unit.factor for point in points] if unit else [*range(1, len(points) + 1)]
    drawn: list[Any] = []
    for number, (key, name) in enumerate(names.items()):
        line = style.LINE_STYLES[number % len(style.LINE_STYLES)]
        rates = np.array([np.nan if point[key] is None else 100 * point[key] for point in points])
        is_again = key in EXPIRING and any(np.abs(rates - other).max() < _ALIKE for other in drawn)
        if np.isnan(rates).all() or is_again:
            continue
        drawn += [] if np.isnan(rates).any() else [rates]
        if key == "reported":
            ax.plot(places, rates, color=style.INK, linewidth=1.6, marker="o", markersize=2.5, label=name)
        else:
            ax.plot(places, rates, linestyle=line, linewidth=1.1, label=name)
    ax.set_ylim(0, 100)
    style.label(ax, f"time ({unit.name})" if unit else "part of the log", "token hit rate (%)")
    style.legend_right(ax)
    return figure

"""One setting varied, everything else the same: what each arm reuses and how long it lets wait, value by value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

from spanlab.report import look, measures, scales

#: What a swept setting is called on its axis; others are called by their key.
NAMES = {
    "workload.rag.order": "order of passages",
    "workload.ragpulse.rate_rps": "offered load (requests/s)",
    "arrivals.rate_rps": "offered load (requests/s)",
    "store.total_gib": "budget for KV (GiB)",
}
_LOG_FROM = 12.0
_BAR_GROUP = 0.84  # of the distance between two values


@dataclass(frozen=True)
class SweptRun:
    """A finished run: what the swept setting was, and the run's `summary.json`."""

    value: str | float
    summary: Mapping[str, Any]


def draw_sweep(key: str, runs: Sequence[SweptRun]) -> Figure:
    """Token hit rate with its infinite-cache bounds above, mean TTFT below; bars for words, lines for numbers.

    Error bars are 95 % intervals over seeds. All runs have the same arms.
    """
    name = NAMES.get(key, key)
    arms = list(runs[0].summary["arms"])
    figure, [[hits], [ttft]] = look.framed_with(
        _footer(runs),
        f"Token hit rate and time to first token by {name.partition(' (')[0]}",
        rows=2,
        height=6.2,
        margins=look.margins_for([*arms, "infinite cache: found"]),
        share=("col", "none"),
        hspace=0.1,
    )
    longest = max(arm["ttft_s"]["mean"] for run in runs for arm in run.summary["arms"].values())
    unit = scales.time_unit(longest)
    strokes = look.strokes((arm, runs[0].summary["arms"][arm]["family"]) for arm in arms)
    for at, arm in enumerate(arms):
        told = [run.summary["arms"][arm] for run in runs]
        x, width = _places(runs, at, len(arms))
        rates, reach = (
            [100 * one["token_hit_rate"] for one in told],
            [measures.saved_half_width_percent(o) for o in told],
        )
        _draw_arm(hits, _Series(arm, strokes[arm], x, width, rates, reach))
        means, reach = [one["ttft_s"]["mean"] * unit.factor for one in told], [_half(one) * unit.factor for one in told]
        _draw_arm(ttft, _Series(arm, strokes[arm], x, width, means, reach))
    _draw_bounds(hits, runs)
    _finish(hits, ttft, runs, name, unit)
    return figure


class _Series(NamedTuple):
    """One arm's values: where they stand, how wide a bar is (0: a line), and half of their intervals."""

    name: str
    stroke: look.Stroke
    x: list[float]
    width: float
    y: list[float]
    half: list[float]


def _places(runs: Sequence[SweptRun], arm: int, arms: int) -> tuple[list[float], float]:
    """Where an arm's values stand on the x axis, and how wide a bar is."""
    if not _of_words(runs):
        return [float(run.value) for run in runs], 0.0
    width = _BAR_GROUP / arms
    return [k + (arm - (arms - 1) / 2) * width for k in range(len(runs))], width


def _of_words(runs: Sequence[SweptRun]) -> bool:
    return isinstance(runs[0].value, str)


def _half(arm: Mapping[str, Any]) -> float:
    low_high = measures.interval(arm["ttft_s_interval"]["mean"])
    return 0.0 if low_high is None else (low_high[1] - low_high[0]) / 2


def _draw_arm(ax: Axes, arm: _Series) -> None:
    colour = arm.stroke.colour
    if arm.width:
        error = arm.half if any(arm.half) else None
        bars = {"ecolor": look.INK, "elinewidth": 0.8}
        ax.bar(arm.x, arm.y, 0.92 * arm.width, color=colour, yerr=error, label=arm.name, error_kw=bars)
        return
    line: dict[str, Any] = {"marker": arm.stroke.marker, "markersize": 5, "linewidth": 1.3, "clip_on": False}
    ax.plot(arm.x, arm.y, color=colour, linestyle=arm.stroke.line, label=arm.name, **line)
    low, high = np.subtract(arm.y, arm.half), np.add(arm.y, arm.half)
    ax.fill_between(arm.x, low, high, color=colour, alpha=0.18, linewidth=0)


def _draw_bounds(ax: Axes, runs: Sequence[SweptRun]) -> None:
    """One dashed level per value and way of looking; equal for all values of a setting that changes no prompt."""
    bounds = [measures.bounds_percent(run.summary["arms"].values()) for run in runs]
    for finds in bounds[0]:
        levels = [bound[finds] for bound in bounds]
        style: dict[str, Any] = {"color": look.INK, "linewidth": 1, "linestyle": look.BOUND_LINES[finds]}
        label = f"infinite cache: {finds}" if len(bounds[0]) == 1 else f"infinite cache:\n{finds}"
        if _of_words(runs):
            ends = _BAR_GROUP / 2
            ax.hlines(levels, np.arange(len(runs)) - ends, np.arange(len(runs)) + ends, label=label, **style)
        else:
            ax.plot([float(run.value) for run in runs], levels, label=label, **style)


def _finish(hits: Axes, ttft: Axes, runs: Sequence[SweptRun], name: str, unit: scales.Unit) -> None:
    if _of_words(runs):
        ttft.set_xticks(range(len(runs)), [str(run.value) for run in runs])
        for ax in (hits, ttft):
            ax.grid(False, axis="x")
    else:
        values = [float(run.value) for run in runs]
        _log_where_wide(ttft.xaxis, values)
        ttft.set_xticks(values, [scales.plain_number(value) for value in values])
    means = [arm["ttft_s"]["mean"] * unit.factor for run in runs for arm in run.summary["arms"].values()]
    if not _log_where_wide(ttft.yaxis, means):
        ttft.set_ylim(bottom=0)
    hits.set_ylim(0, 100)
    look.label(hits, y="token hit rate (%)")
    look.label(ttft, name, f"mean TTFT ({unit.name})")
    look.legend_right(hits)


def _log_where_wide(axis: Axis, values: Sequence[float]) -> bool:
    """A log axis where the values span more than a linear one shows; whether it is one."""
    wide = min(values) > 0 and max(values) > _LOG_FROM * min(values)
    if wide:
        scales.log_scale(axis, min(values), max(values))
    return wide


def _footer(runs: Sequence[SweptRun]) -> str:
    """What the runs have in common; a store or a load that differs is on the axis."""
    first = runs[0].summary
    stores = {run.summary["store"] for run in runs}
    seeds = len(first["seeds"])
    parts = [
        first["study"],
        f"{first['workload']['name']} ({first['workload']['provenance']})",
        first["model"],
        f"{first['timing']} on {first['hardware']}, uncalibrated",
        f"store {stores.pop()}" if len(stores) == 1 else "",
        f"{seeds} seed{'s' if seeds > 1 else ''}",
        "simulated" if first["backend"] == "sim" else "measured",
        f"commit {', '.join(sorted({run.summary['commit'] for run in runs}))}",
    ]
    return " · ".join(part for part in parts if part)

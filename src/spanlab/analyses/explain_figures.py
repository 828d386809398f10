"""Figures of the analysis `explain`: hit rate over memory and over time, and the calls of a session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from spanlab.analyses.fixes import Facts
from spanlab.offline.replay import ReplayResult
from spanlab.report import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAUSES = {
    "never_seen": "never seen",
    "kv_evicted": "KV evicted",
    "state_evicted": "state evicted",
    "state_never_placed": "no state placed",
    "alignment": "alignment",
    "last_token": "last token",
    "never_stored": "never stored",
    "repair": "repair",
}
BOUNDS = {"prefix": "prefix, no limit", "any_position": "seen before, any position", "offline_optimum": "best eviction"}
MOST_CALLS = 120  # of a session in its figure
INTERVALS = 60  # of the log's time
_NO_FAULT = (None, "new_text")
_BREAK_COLOURS = ("#cc3311", "#ee7733", "#aa4499", "#997700", "#882255")


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
# The calls of the session that loses most: reused and lost tokens, and why they were lost.
# ------------------------------------------------------------------------------


def calls_of(facts: Facts, replayed: ReplayResult, classes: Mapping[int, str]) -> dict[str, Any] | None:
    """Return the first calls of the session that loses most to breaks and evictions; None without sessions.

    A call has its time, its prompt and reused tokens, those lost by cause, and the class of its break; tokens behind a
    break count as `break`, new ones as `never_seen`. `cached_tokens` are those that the server reports.
    """
    log = facts.log
    if log.sessions is None:
        return None
    behind = np.zeros(log.requests, dtype=np.int64)
    at_break = np.array([request for request, kind in classes.items() if kind not in _NO_FAULT], dtype=np.int64)
    behind[at_break] = replayed.lost["never_seen"][at_break]
    lost = {cause: values for cause, values in replayed.lost.items() if cause != "never_seen"}
    losing = behind + sum(lost.values())
    session = int(np.argmax(np.bincount(log.sessions, losing)))
    requests = np.flatnonzero(log.sessions == session)
    calls = [
        {
            "request": request,
            "at_s": float(log.arrived_ns[request]) * 1e-9,
            "prompt_tokens": int(facts.paths.prompt_tokens[request]),
            "reused_tokens": int(replayed.reused[request]),
            "cached_tokens": _reported(facts, request),
            "class": classes.get(request),
            "lost_by_cause": {
                "never_seen": int(replayed.lost["never_seen"][request] - behind[request]),
                "break": int(behind[request]),
                **{cause: int(values[request]) for cause, values in lost.items() if values[request]},
            },
        }
        for request in requests[:MOST_CALLS].tolist()
    ]
    return {"session": session, "calls": calls, "further_calls": max(0, len(requests) - MOST_CALLS)}


def _reported(facts: Facts, request: int) -> int | None:
    usage = facts.log.usage
    return None if usage is None or np.isnan(usage[request, 1]) else int(usage[request, 1])


def draw_calls(summary: Mapping[str, Any], title: str) -> Figure:
    """Draw the tokens of each call of a session: reused, and lost by cause or by the class of a break."""
    session = summary["session"]
    calls = session["calls"]
    numbers = np.arange(1, len(calls) + 1)
    parts = {("reused", style.CAUSE_COLOURS["reused"]): np.array([call["reused_tokens"] for call in calls])}
    causes = dict.fromkeys(cause for call in calls for cause in call["lost_by_cause"])
    for cause in [cause for cause in causes if cause not in ("break", "never_seen")]:
        tokens = np.array([call["lost_by_cause"].get(cause, 0) for call in calls])
        parts[CAUSES[cause], style.CAUSE_COLOURS[cause]] = tokens
    kinds = dict.fromkeys(call["class"] for call in calls if call["lost_by_cause"]["break"])
    for number, kind in enumerate(kinds):
        tokens = np.array([call["lost_by_cause"]["break"] * (call["class"] == kind) for call in calls])
        parts[f"lost: {str(kind).replace('_', ' ')}", _BREAK_COLOURS[number % len(_BREAK_COLOURS)]] = tokens
    fresh = np.array([call["lost_by_cause"]["never_seen"] for call in calls])
    parts["new", style.CAUSE_COLOURS["never_seen"]] = fresh
    shown = {key: tokens for key, tokens in parts.items() if tokens.any()}
    margins = style.margins_for([name for name, _ in shown] + ["reported as cached"])
    heading = f"Calls of session {session['session']}, which loses most"
    figure, [[ax]] = style.framed_with(title, heading, margins=margins)
    below = np.zeros(len(calls))
    for (name, colour), tokens in shown.items():
        ax.bar(numbers, tokens, 0.85, bottom=below, color=colour, label=name, linewidth=0)
        below = below + tokens
    reported = [np.nan if call["cached_tokens"] is None else call["cached_tokens"] for call in calls]
    if not np.isnan(reported).all():
        ax.plot(numbers, reported, "_", color=style.INK, markersize=6, label="reported as cached")
    style.count_ticks(ax.yaxis)
    style.label(ax, "call", "tokens of the prompt")
    style.legend_right(ax)
    return figure


# ------------------------------------------------------------------------------
# Hit rate over the time of the log.
# ------------------------------------------------------------------------------


def over_time(facts: Facts, replayed: ReplayResult) -> list[dict[str, Any]]:
    """Return hit rates of equal intervals of the log's time, or of its requests if it has no times."""
    log, prompt = facts.log, facts.paths.prompt_tokens
    clock = log.arrived_ns if log.arrived_ns.any() else np.arange(log.requests)
    span = max(int(clock[-1] - clock[0]), 1)
    interval = np.minimum((clock - clock[0]) / span * INTERVALS, INTERVALS - 1).astype(np.int64)
    reported = None if log.usage is None else ~np.isnan(log.usage[:, :2]).any(axis=1)

    def by_interval(values: Any) -> Any:
        return np.bincount(interval, values, INTERVALS)

    total = by_interval(prompt)
    sums = {"token_hit_rate": by_interval(replayed.reused), "prefix": by_interval(facts.paths.seen_tokens)}
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
    """Draw hit rates over time: of the explained arm, without a limit of memory, and as the server reports."""
    points = summary["over_time"]
    if len(points) < 2:
        return None
    names = {"token_hit_rate": summary["explained"], "prefix": BOUNDS["prefix"], "reported": "reported by the server"}
    figure, [[ax]] = style.framed_with(title, "Token hit rate over time", margins=style.margins_for(names.values()))
    is_timed = points[0]["at_s"] is not None
    unit = style.time_unit(points[-1]["at_s"]) if is_timed else None
    places = [point["at_s"] * unit.factor for point in points] if unit else [*range(1, len(points) + 1)]
    for (key, name), line in zip(names.items(), style.LINE_STYLES, strict=False):
        rates = [np.nan if point[key] is None else 100 * point[key] for point in points]
        if not np.isnan(rates).all():
            ax.plot(places, rates, linestyle=line, linewidth=1.3, marker="o", markersize=2.5, label=name)
    ax.set_ylim(0, 100)
    style.label(ax, f"time ({unit.name})" if unit else "part of the log", "token hit rate (%)")
    style.legend_right(ax)
    return figure

"""Figures of the analysis `explain`: hit rate over memory and over time, and the session that loses
most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from spanlab.analyses.fixes import Facts
from spanlab.offline.expiry import NS, gaps_s
from spanlab.offline.forest import Flags, Floats, Ints
from spanlab.offline.replay import ReplayResult
from spanlab.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BOUNDS = {
    "prefix": "prefix, no limit",
    "any_position": "seen before, any position",
    "offline_optimum": "best eviction",
}
INTERVALS = 60  # of the log's time
_ALIKE = 1.0  # points: lines that are nearer to each other everywhere are drawn once
#: Caches that expire whose hit rate over time is drawn, those with the shortest times first.
EXPIRING = ("anthropic_5m", "anthropic_1h", "openai_24h", "fitted_longest", "ttl")


def draw_curve(summary: Mapping[str, Any], title: str) -> Figure:
    """Draw the LRU hit rate by memory, with horizontal lines for the bounds and for the presets."""
    curve = summary["capacity_curve"]
    names = [*BOUNDS.values(), *summary["presets"]]
    figure, [[ax]] = style.framed_with(
        title, "Token hit rate by memory for KV", margins=style.margins_for(names)
    )
    sizes = [point["gib"] for point in curve]
    shares = [100 * point["token_hit_rate"] for point in curve]
    ax.plot(sizes, shares, color=style.INK, marker="o", markersize=3, linewidth=1.3, label="LRU")
    for (key, name), line in zip(BOUNDS.items(), style.LINE_STYLES[1:], strict=True):
        if summary["bounds"][key] is not None:
            ax.axhline(
                100 * summary["bounds"][key],
                color="#777777",
                linestyle=line,
                linewidth=1,
                label=name,
            )
    for number, (name, preset) in enumerate(summary["presets"].items()):
        colour = f"C{number}"
        ax.axhline(
            100 * preset["token_hit_rate"], color=colour, linewidth=0.8, alpha=0.8, label=name
        )
    ax.set_xscale("log")
    ax.set_ylim(0, 100)
    style.label(ax, "memory for KV (GiB)", "token hit rate (%)")
    style.legend_right(ax)
    return figure


# ------------------------------------------------------------------------------
# Hit rate over the time of the log.
# ------------------------------------------------------------------------------


def over_time(
    facts: Facts, replayed: ReplayResult, expiring: Mapping[str, Ints]
) -> list[dict[str, Any]]:
    """Return hit rates of equal intervals of the log's time, or of its requests if it has no times.

    `expiring`  reused tokens of each prompt by name of a cache that expires
    """
    log, prompt = facts.log, facts.paths.prompt_tokens
    clock = log.arrived_ns if log.arrived_ns.any() else np.arange(log.requests)
    span = max(int(clock[-1] - clock[0]), 1)
    interval = np.minimum((clock - clock[0]) / span * INTERVALS, INTERVALS - 1).astype(np.int64)

    def by_interval(values: Any) -> Any:
        return np.bincount(interval, values, INTERVALS)

    total = by_interval(prompt)
    sums = {
        "token_hit_rate": by_interval(replayed.reused),
        "prefix": by_interval(facts.paths.seen_tokens),
    }
    sums |= {name: by_interval(reused) for name, reused in expiring.items()}
    counted = np.zeros((INTERVALS, 2))
    if log.usage is not None:
        reported = _has_counts(facts)
        counted = np.stack(
            [by_interval(np.where(reported, log.usage[:, index], 0)) for index in (0, 1)], axis=1
        )
    return [
        {
            "at_s": (number + 0.5) * span / INTERVALS * 1e-9 if log.arrived_ns.any() else None,
            "prompt_tokens": int(total[number]),
            **{name: float(values[number] / total[number]) for name, values in sums.items()},
            "reported": float(counted[number, 1] / counted[number, 0])
            if counted[number, 0]
            else None,
        }
        for number in range(INTERVALS)
        if total[number]
    ]


def draw_over_time(summary: Mapping[str, Any], title: str) -> Figure | None:
    """Draw hit rates over time: of the explained arm, of caches that expire, without a limit, and
    as reported."""
    points = summary["over_time"]
    if len(points) < 2:
        return None
    names = {
        "token_hit_rate": summary["explained"],
        "prefix": BOUNDS["prefix"],
        "reported": "reported by the server",
    }
    names |= {name: f"expires: {name}" for name in EXPIRING if name in points[0]}
    figure, [[ax]] = style.framed_with(
        title, "Token hit rate over time", margins=style.margins_for(names.values())
    )
    is_timed = points[0]["at_s"] is not None
    unit = style.time_unit(points[-1]["at_s"]) if is_timed else None
    places = (
        [point["at_s"] * unit.factor for point in points] if unit else [*range(1, len(points) + 1)]
    )
    drawn: list[Any] = []
    for number, (key, name) in enumerate(names.items()):
        line = style.LINE_STYLES[number % len(style.LINE_STYLES)]
        rates = np.array([np.nan if point[key] is None else 100 * point[key] for point in points])
        is_again = key in EXPIRING and any(np.abs(rates - other).max() < _ALIKE for other in drawn)
        if np.isnan(rates).all() or is_again:
            continue
        drawn += [] if np.isnan(rates).any() else [rates]
        if key == "reported":
            ax.plot(
                places,
                rates,
                color=style.INK,
                linewidth=1.6,
                marker="o",
                markersize=2.5,
                label=name,
            )
        else:
            ax.plot(places, rates, linestyle=line, linewidth=1.1, label=name)
    ax.set_ylim(0, 100)
    style.label(ax, f"time ({unit.name})" if unit else "part of the log", "token hit rate (%)")
    style.legend_right(ax)
    return figure


# ------------------------------------------------------------------------------
# The calls of the session that loses most: tokens that were cached, written, new or lost, and
# gaps between calls.
# ------------------------------------------------------------------------------

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
MOST_CALLS = 120  # of a session in its figure
BREAK = "break "  # before the class of a break, in the name of a part
_NO_FAULT = (None, "new_text")
_BREAK_COLOURS = ("#cc3311", "#ee7733", "#aa4499", "#997700", "#882255")
#: Names and colours of the parts of a prompt, from the bottom of its bar.
_PARTS = {
    "reused": ("reused", style.CAUSE_COLOURS["reused"]),
    "cached": ("cached", style.CAUSE_COLOURS["reused"]),
    "expired": ("lost: expired", "#332288"),
    "not_found": ("lost: not found", "#88ccee"),
    **{
        cause: (f"lost: {CAUSES[cause]}", style.CAUSE_COLOURS[cause])
        for cause in CAUSES
        if cause != "never_seen"
    },
}
_NEW = {
    "created": ("new, written", "#bbbbbb"),
    "fresh": ("new, not written", style.CAUSE_COLOURS["never_seen"]),
    "new": ("new", style.CAUSE_COLOURS["never_seen"]),
    "unknown": ("not reported", "#f0f0f0"),
}
_LEAST_LOST = 0.02  # of a prompt: fewer tokens than that are the end of its last block, or lengths that are estimates
_LONG_GAP_S = 60.0  # between calls, from which on the figure shows it
_USUAL_TTL_S = 300.0
_LABEL = 0.03  # of the width of the figure: room for a label of a gap


def calls_of(
    facts: Facts,
    replayed: ReplayResult,
    classes: Mapping[int, str],
    fitted: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Return the first calls of the session that loses most to breaks and evictions; None without
    sessions.

    A call has its time, its prompt and reused tokens, those lost by cause, and the class of its
    break; tokens behind a break count as `break`, new ones as `never_seen`. `cached_tokens` are
    those that the server reports, and `gap_s` the time since the call before it. `parts` are the
    tokens of its bar by name. They are by the provider's counts if half of the calls have them
    (`counted`), and otherwise those of the explained arm. What was seen before and not found is
    `expired` after the longest end of the `fitted` time to live.
    """
    log = facts.log
    if log.sessions is None:
        return None
    behind = np.zeros(log.requests, dtype=np.int64)
    at_break = np.array(
        [request for request, kind in classes.items() if kind not in _NO_FAULT], dtype=np.int64
    )
    behind[at_break] = replayed.lost["never_seen"][at_break]
    lost = {cause: values for cause, values in replayed.lost.items() if cause != "never_seen"}
    losing = behind + sum(lost.values())
    session = int(np.argmax(np.bincount(log.sessions, losing)))
    requests = np.flatnonzero(log.sessions == session)
    shown = requests[:MOST_CALLS]
    is_counted = bool(2 * np.sum(_has_counts(facts)[shown]) >= len(shown))
    # the seconds since the longest earlier prefix of each prompt was used; infinite without one
    ages = np.full(log.requests, np.inf)
    if is_counted:  # no other parts of a call depend on them
        gaps = gaps_s(facts.paths, log.arrived_ns)
        again = np.flatnonzero(np.isfinite(gaps))
        ages[facts.paths.owner[again]] = gaps[again]  # the last one of each request counts
    ttl_s = None if fitted is None else fitted["longest_s"]
    usage, calls = log.usage, []
    for index, request in enumerate(shown.tolist()):
        by_cause = {
            "never_seen": int(replayed.lost["never_seen"][request] - behind[request]),
            "break": int(behind[request]),
            **{cause: int(values[request]) for cause, values in lost.items() if values[request]},
        }
        kind = classes.get(request)
        call = {
            "request": request,
            "at_s": float(log.arrived_ns[request]) / NS,
            "gap_s": float(log.arrived_ns[request] - log.arrived_ns[shown[index - 1]]) / NS
            if index
            else None,
            "prompt_tokens": int(facts.paths.prompt_tokens[request]),
            "reused_tokens": int(replayed.reused[request]),
            "cached_tokens": None
            if usage is None or np.isnan(usage[request, 1])
            else int(usage[request, 1]),
            "class": kind,
            "lost_by_cause": by_cause,
        }
        age = call["gap_s"] if fitted is not None and fitted["within_sessions"] else ages[request]
        is_expired = ttl_s is not None and age is not None and age >= ttl_s
        call["parts"] = (
            _counted(facts, call, is_expired=is_expired) if is_counted else _simulated(call)
        )
        calls.append(call)
    return {
        "session": session,
        "counted": is_counted,
        "calls": calls,
        "further_calls": max(0, len(requests) - MOST_CALLS),
    }


def _has_counts(facts: Facts) -> Flags:
    usage = facts.log.usage
    if usage is None:
        return np.zeros(facts.log.requests, dtype=np.bool_)
    return np.asarray(~np.isnan(usage[:, :2]).any(axis=1))


def _simulated(call: Mapping[str, Any]) -> dict[str, int]:
    """Return the parts of a prompt by the explained arm."""
    causes = dict(call["lost_by_cause"])
    new, behind = causes.pop("never_seen"), causes.pop("break")
    parts = {
        "reused": call["reused_tokens"],
        **causes,
        f"{BREAK}{call['class']}": behind,
        "new": new,
    }
    return {name: tokens for name, tokens in parts.items() if tokens}


def _counted(facts: Facts, call: Mapping[str, Any], *, is_expired: bool) -> dict[str, int]:
    """Return the parts of a prompt by the provider's counts; written tokens count as lost ones
    first."""
    request = call["request"]
    usage = facts.log.usage
    assert usage is not None, "the session has counts"
    prompt, cached, created = (0.0 if np.isnan(count) else float(count) for count in usage[request])
    if not prompt or call["cached_tokens"] is None:
        return {"unknown": call["prompt_tokens"]}
    scale = prompt / max(call["prompt_tokens"], 1)
    seen = min(prompt, float(facts.paths.seen_tokens[request]) * scale)
    lost = seen - cached if seen - cached > _LEAST_LOST * prompt else 0.0
    behind = max(0.0, min(call["lost_by_cause"]["break"] * scale, prompt - cached - lost))
    rest = prompt - cached - lost - behind
    written = min(rest, max(0.0, created - lost - behind))
    ends = np.cumsum([cached, lost, behind, written, rest - written])
    whole = np.diff(np.rint(ends).astype(np.int64), prepend=0).tolist()
    names = (
        "cached",
        "expired" if is_expired else "not_found",
        f"{BREAK}{call['class']}",
        "created",
        "fresh",
    )
    return {name: tokens for name, tokens in zip(names, whole, strict=True) if tokens}


# ------------------------------------------------------------------------------
# The figure.
# ------------------------------------------------------------------------------


def draw_calls(summary: Mapping[str, Any], title: str) -> Figure:
    """Draw the tokens of each call of a session, with the gaps between its calls."""
    session = summary["session"]
    calls = session["calls"]
    # the parts of the bars from the bottom, by name, with their tokens of each call
    kinds = dict.fromkeys(
        name for call in calls for name in call["parts"] if name.startswith(BREAK)
    )
    styles = dict(_PARTS)
    for number, name in enumerate(kinds):
        words = name.removeprefix(BREAK).replace("_", " ")
        styles[name] = f"lost: {words}", _BREAK_COLOURS[number % len(_BREAK_COLOURS)]
    styles |= _NEW
    tokens = {name: np.array([call["parts"].get(name, 0) for call in calls]) for name in styles}
    parts = {name: values for name, values in tokens.items() if values.any()}
    margins = style.margins_for([styles[name][0] for name in parts])
    source = "as the provider counts them" if session["counted"] else f"as {summary['explained']}"
    heading = f"Session {session['session']}, which loses most: the tokens of its calls, {source}"
    figure, [[ax]] = style.framed_with(title, heading, margins=margins)
    # the places of the bars, with room for each long gap
    steps = [
        0.0 if call["gap_s"] is None else 2.2 if call["gap_s"] >= _LONG_GAP_S else 1.0
        for call in calls
    ]
    places = np.cumsum(steps)
    below = np.zeros(len(calls))
    for name, values in parts.items():
        label, colour = styles[name]
        ax.bar(places, values, 0.9, bottom=below, color=colour, label=label, linewidth=0)
        below = below + values
    ax.set_ylim(0, 1.18 * max(float(below.max()), 1.0))
    _mark_gaps(ax, calls, places, summary)
    step = max(1, -(-len(calls) // 12))
    ax.set_xticks(places[::step], [str(number + 1) for number in range(0, len(calls), step)])
    style.count_ticks(ax.yaxis)
    style.label(
        ax,
        "call; dashed lines are gaps, red ones longer than the time to live",
        "tokens of the prompt",
    )
    style.legend_right(ax)
    return figure


def _mark_gaps(
    ax: Axes, calls: list[dict[str, Any]], places: Floats, summary: Mapping[str, Any]
) -> None:
    ttl_s = ttl_of(summary) or _USUAL_TTL_S
    top = ax.get_ylim()[1]
    long = [
        index
        for index, call in enumerate(calls)
        if call["gap_s"] is not None and call["gap_s"] >= _LONG_GAP_S
    ]
    named: list[int] = []
    # labels of shorter gaps would touch others
    for index in sorted(long, key=lambda index: -calls[index]["gap_s"]):
        if all(abs(places[index] - places[other]) > _LABEL * places[-1] for other in named):
            named.append(index)
    for index in long:
        gap = calls[index]["gap_s"]
        middle = (places[index - 1] + places[index]) / 2
        colour = "#cc3311" if gap >= ttl_s else "#888888"
        ax.axvline(middle, color=colour, linestyle=(0, (4, 2)), linewidth=0.8)
        if index in named:
            ax.text(
                middle,
                top,
                f"{duration(gap)} ",
                rotation=90,
                va="top",
                ha="right",
                fontsize=6.5,
                color=colour,
            )


def duration(seconds: float) -> str:
    """Return a time in its largest fitting unit: 40 s, 7 min, 2.5 h, 3 d."""
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return (
                f"{seconds / size:.2g} {unit}"
                if seconds < 10 * size
                else f"{seconds / size:.0f} {unit}"
            )
    return f"{seconds:.0f} s"


def ttl_of(summary: Mapping[str, Any]) -> float | None:
    """Return the longest end of the fitted time to live; None if there is none."""
    expiry = summary["expiry"]
    fitted = None if expiry is None else expiry["fitted"]
    return None if fitted is None else fitted["longest_s"]

"""Reasons why targets are not met, from reference runs with unlimited memory and without waiting."""

from __future__ import annotations

from spanlab.report import units
from spanlab.settings.slo import Target
from spanlab.study.plan.outcome import Outcome
from spanlab.study.plan.planner import Planner

_PARTS = {
    "queue": "nothing waits then, and admission alone takes longer",
    "ttft": "prefill alone takes longer",
    "tpot": "a decode step alone takes longer",
    "e2e": "prefill and decode alone take longer",
}


UNSURE = "the interval extends beyond the target, and more requests would narrow it"


def value_of(outcome: Outcome, target: Target) -> str:
    """Return a target's statistic and interval as text."""
    interval = outcome.intervals[target.key]
    ends = None if interval.low is None or interval.high is None else (interval.low, interval.high)
    return f"{target.key} is {units.seconds(interval.mean, ends)}"


def why_memory_fails(planner: Planner) -> str:
    """Return why no memory meets the targets at this load."""
    floor, free = planner.references["floor"], planner.references["no_limit"]
    hits = f"hits are bounded by {units.percent(free.mean('token_hit_rate'))} of the prompt tokens"
    floor_text = f"one request at a time and memory without limit, {value_of(floor, floor.worst)}"
    if floor.fails:
        return f"{floor_text}: {_PARTS[floor.worst.delay]}; {hits}"
    times = free.mean("utilisation") or 0.0
    if times >= 1:
        return f"the load exceeds saturation, {times:.3g} times what can be served with memory without limit; {hits}"
    if not floor.meets:
        return f"{floor_text}: {UNSURE}; {hits}"
    grows = "the queue grows" if free.grows else value_of(free, free.worst)
    waits = "though one request at a time meets it: requests wait for each other, not for memory"
    return f"with memory without limit {grows} at this load, {waits}; {hits}"


def why_load_fails(planner: Planner) -> str:
    """Return why no load meets the targets with this memory."""
    alone, floor = planner.references["alone"], planner.references["floor"]
    worst = alone.worst
    above = f", more than {worst.limit_s:g} s: {_PARTS[worst.delay]}" if alone.fails else f": {UNSURE}"
    alone_text = f"one request at a time, {value_of(alone, worst)}{above}"
    if floor.meets:
        return f"{alone_text} with {planner.memory_text}; with memory without limit {value_of(floor, worst)}"
    return f"{alone_text}, with memory without limit too"


def no_more_hits(planner: Planner) -> str | None:
    """Return a sentence that more memory adds no hits; None where it does."""
    limited = planner.references["own"].mean("token_hit_rate")
    unlimited = planner.references["no_limit"].mean("token_hit_rate")
    if limited is None or unlimited is None or unlimited - limited >= 0.005:
        return None
    with_limit, without = units.percent(limited), units.percent(unlimited)
    return f"more memory brings no hits: {with_limit} with {planner.memory_text}, {without} without limit"

"""Why targets are not met: told from runs without limits of memory and without waiting."""

from __future__ import annotations

from spanlab.report.units import percent, seconds
from spanlab.settings.slo import Target
from spanlab.study.plan.outcome import Outcome
from spanlab.study.plan.planner import Planner

_PARTS = {
    "queue": "nothing waits then, and admission alone takes longer",
    "ttft": "prefill alone takes longer",
    "tpot": "a decode step alone takes longer",
    "e2e": "prefill and decode alone take longer",
}


def value_of(outcome: Outcome, target: Target) -> str:
    """A statistic with its interval."""
    interval = outcome.intervals[target.key]
    ends = None if interval.low is None or interval.high is None else (interval.low, interval.high)
    return f"{target.key} is {seconds(interval.mean, ends)}"


def why_memory_fails(planner: Planner) -> str:
    """Why no memory meets the targets at this load."""
    floor, free = planner.references["floor"], planner.references["no_limit"]
    hits = f"hits are bounded by {percent(free.mean('token_hit_rate'))} of the prompt tokens"
    if not floor.meets:
        told = value_of(floor, floor.worst)
        return f"one request at a time and memory without limit, {told}: {_PARTS[floor.worst.delay]}; {hits}"
    return f"{_overload(free)}: requests wait for each other, not for memory; {hits}"


def _overload(free: Outcome) -> str:
    utilisation = free.mean("utilisation")
    if utilisation is not None and utilisation >= 1:
        return f"the load exceeds saturation, {utilisation:.3g} times what can be served with memory without limit"
    grows = "the queue grows" if free.grows else value_of(free, free.worst)
    return f"with memory without limit {grows} at this load, though one request at a time meets it"


def why_load_fails(planner: Planner) -> str:
    """Why no load meets the targets with this memory."""
    alone, floor = planner.references["alone"], planner.references["floor"]
    told = f"one request at a time, {value_of(alone, alone.worst)}: {_PARTS[alone.worst.delay]}"
    if floor.meets:
        return f"{told} with {planner.memory_words}; with memory without limit {value_of(floor, alone.worst)}"
    return f"{told}, with memory without limit too"


def no_more_hits(planner: Planner) -> str | None:
    """That more memory adds no hits; None where it does."""
    own = planner.references["own"].mean("token_hit_rate")
    free = planner.references["no_limit"].mean("token_hit_rate")
    if own is None or free is None or free - own >= 0.005:
        return None
    return f"more memory brings no hits: {percent(own)} with {planner.memory_words}, {percent(free)} without limit"

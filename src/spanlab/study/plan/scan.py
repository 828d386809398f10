"""Values of a choice that need not be monotone: all are tried, and the best is named with those as good."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spanlab.study.plan.found import Axis, Found, Mark
from spanlab.study.plan.outcome import Outcome
from spanlab.study.plan.planner import Planner
from spanlab.study.plan.point import Point
from spanlab.study.plan.reasons import value_of


def scan(
    planner: Planner,
    axis: Axis,
    points: dict[float, Point],
    worded: Callable[[float], str],
    marks: Sequence[Mark] = (),
) -> Found:
    """Try every value; `worded` says a value in words."""
    values = sorted(points)
    outcomes = planner.try_points([points[value] for value in values], [worded(value) for value in values], every=True)
    curve = list(zip(values, outcomes, strict=True))
    best, chosen = min(curve, key=lambda one: (one[1].grows, one[1].distance))
    alike = [value for value, outcome in curve if value != best and _as_good(outcome, chosen)]
    meeting = [value for value, outcome in curve if outcome.meets]
    return Found(
        axis=axis,
        curve=curve,
        verdict=_verdict(planner, worded(best), chosen, len(alike), bool(meeting)),
        helps=bool(meeting),
        value=best if meeting else None,
        answer={axis.key: best, f"{axis.key}_alike": alike, f"{axis.key}_meeting": meeting},
        marks=marks,
    )


def _as_good(outcome: Outcome, best: Outcome) -> bool:
    """Whether intervals of the best one's worst target overlap."""
    if outcome.grows != best.grows:
        return False
    a, b = outcome.intervals[best.worst.key], best.intervals[best.worst.key]
    return a.mean <= b.mean or (a.low is not None and b.high is not None and a.low <= b.high)


def _verdict(planner: Planner, best: str, chosen: Outcome, alike: int, meets: bool) -> str:
    others = f", {alike} others within its interval" if alike else ""
    told = "the queue grows" if chosen.grows else value_of(chosen, chosen.worst)
    if meets:
        return f"{best} is best, {told}{others}"
    return f"no value meets {planner.aims}: the best, {best}, has {told}{others}"

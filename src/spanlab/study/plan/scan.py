"""Scan of an axis that need not be monotone: all values are tried, and the best and its equals are reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spanlab.study.plan.outcome import Outcome
from spanlab.study.plan.planner import Planner
from spanlab.study.plan.point import Point
from spanlab.study.plan.reasons import value_of
from spanlab.study.plan.search_result import Axis, Mark, SearchResult


def scan(
    planner: Planner,
    axis: Axis,
    points: dict[float, Point],
    describe: Callable[[float], str],
    marks: Sequence[Mark] = (),
) -> SearchResult:
    """Try every value and return the best; `describe` formats a value."""
    values = sorted(points)
    outcomes = planner.trials.outcomes(
        [points[value] for value in values], [describe(value) for value in values], every=True
    )
    curve = list(zip(values, outcomes, strict=True))
    best, chosen = min(curve, key=lambda pair: (pair[1].grows, pair[1].distance))
    as_good = [value for value, outcome in curve if value != best and _is_as_good(outcome, chosen)]
    meeting = [value for value, outcome in curve if outcome.meets]
    return SearchResult(
        axis=axis,
        curve=curve,
        verdict=_verdict(planner, describe(best), chosen, len(as_good), bool(meeting)),
        value=best if meeting else None,
        answer={axis.key: best, f"{axis.key}_alike": as_good, f"{axis.key}_meeting": meeting},
        marks=marks,
    )


def _is_as_good(outcome: Outcome, best: Outcome) -> bool:
    """Return whether the intervals of the best outcome's worst target overlap."""
    if outcome.grows != best.grows:
        return False
    a, b = outcome.intervals[best.worst.key], best.intervals[best.worst.key]
    return a.mean <= b.mean or (a.low is not None and b.high is not None and a.low <= b.high)


def _verdict(planner: Planner, best: str, chosen: Outcome, as_good: int, meets: bool) -> str:
    as_good_text = f", {as_good} others within its interval" if as_good else ""
    statistic = "the queue grows" if chosen.grows else value_of(chosen, chosen.worst)
    if meets:
        return f"{best} is best, {statistic}{as_good_text}"
    return f"no value meets {planner.targets_text}: the best, {best}, has {statistic}{as_good_text}"

"""What the simulator should reach, and whether it did: plain counts, and a verdict where noise allows one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from spanlab.analysis.equivalence import equivalent

#: No verdict where the engine's own repeats differ (A/A) by more than so many times a goal.
NOISE_LIMIT = 2.0


class Goal(NamedTuple):
    """`error` of `metric` is at most `limit`; `spread` is what the engine's repeats say of the same."""

    words: str
    metric: str
    error: str
    spread: str
    limit: float


GOALS = tuple(
    Goal(f"{words} of {name}", metric, error, spread, limit)
    for metric, name in (("ttft_s", "TTFT"), ("e2e_s", "E2E"))
    for words, error, spread, limit in (
        ("mean", "bias", "mean", 0.05),
        ("median request's error", "request_p50", "request_p50", 0.05),
        ("95th percentile of requests' errors", "request_p95", "request_p95", 0.15),
    )
)

TAU_GOAL = 0.9


class Verdict(NamedTuple):
    """One number beside its goal.

    within  the number itself is at most the limit
    met     it is shown to be; None where the engine's own spread is unknown, or too large to say
    """

    error: float
    spread: float | None
    within: bool
    met: bool | None

    @staticmethod
    def of(error: float, spread: float | None, limit: float, shown: bool = True) -> Verdict:
        """Met where within the limit and `shown` by a test; noise takes a verdict away, never gives one."""
        within = abs(error) <= limit
        quiet = spread is not None and spread <= NOISE_LIMIT * limit
        return Verdict(error, spread, within, within and shown if quiet else None)


def judge(cells: Iterable[dict[str, Any]], decisions: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every goal over all cells (an arm at a load): plain count, count shown, and the largest error.

    cells_within_goal  cells whose error is within the goal, whatever the noise
    cells_met          cells for which that is shown: of means by two one-sided tests
    cells_noisy        cells without a verdict: one repeat, or A/A above twice the goal
    met                of every cell; False where one fails, None where none fails and one is noisy

    `cells` hold `arm`, `load`, `rate_rps` and `errors`, as `errors.errors` makes them; `decisions` hold `load`,
    `rate_rps` and, of two arms or more, the fields of `decisions.decide`.
    """
    cells = list(cells)
    return [_over_cells(goal, cells) for goal in GOALS] + [_of_ranks(list(decisions))]


def _over_cells(goal: Goal, cells: list[dict[str, Any]]) -> dict[str, Any]:
    found = []
    for cell in cells:
        values = cell["errors"][goal.metric]
        spread = values["spread"][goal.spread] if values["spread"] else None
        shown = goal.error != "bias" or equivalent(values["bias_interval"], goal.limit)
        verdict = Verdict.of(values[goal.error], spread, goal.limit, shown)
        found.append((verdict, f"{cell['arm']} at {load_words(cell['load'], cell['rate_rps'])}"))
    return _judged(goal.words, goal.limit, found) | {"signed": goal.error == "bias"}


def _of_ranks(decisions: list[dict[str, Any]]) -> dict[str, Any]:
    """Tau as its distance from 1, so that it is judged as the errors are."""
    limit, found = round(1 - TAU_GOAL, 9), []
    for one in (decision for decision in decisions if "tau" in decision):
        spread = None if one["aa_tau"] is None else round(1 - one["aa_tau"], 9)
        if one["tau"] is not None:
            verdict = Verdict.of(round(1 - one["tau"], 9), spread, limit)
            found.append((verdict, load_words(one["load"], one["rate_rps"])))
    return _judged("1 − Kendall tau of arms by mean TTFT", limit, found) | {"signed": False}


def _judged(words: str, limit: float, found: list[tuple[Verdict, str]]) -> dict[str, Any]:
    worst, where = max(found, key=lambda one: abs(one[0].error), default=(None, ""))
    return {
        "goal": words,
        "limit": limit,
        "met": _together([verdict.met for verdict, _ in found]),
        "cells_within_goal": sum(verdict.within for verdict, _ in found),
        "cells_met": sum(verdict.met is True for verdict, _ in found),
        "cells_noisy": sum(verdict.met is None for verdict, _ in found),
        "cells": len(found),
        "worst": where,
        "worst_error": None if worst is None else worst.error,
        "worst_spread": None if worst is None else worst.spread,
    }


def load_words(share: float | None, rate_rps: float | None) -> str:
    """The load of a cell in words: a share of saturation, or the rate that the study set."""
    if share is not None:
        return f"load {share:g}"
    return "the given arrivals" if rate_rps is None else f"{rate_rps:g} requests/s"


def _together(met: list[bool | None]) -> bool | None:
    if False in met:
        return False
    return None if None in met or not met else True

"""What the simulator should reach, and whether it did: an absolute goal, or what the engine itself cannot repeat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

#: An error within so many times the spread of the engine's own repeats is no error that they could show.
WITHIN_SPREAD = 1.5


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
    """One number beside its goal and beside the engine's own spread; `spread` is None for a single repeat."""

    error: float
    spread: float | None
    met: bool

    @staticmethod
    def of(error: float, spread: float | None, limit: float) -> Verdict:
        """Met within the limit, or within 1.5 times the spread."""
        return Verdict(error, spread, abs(error) <= max(limit, WITHIN_SPREAD * (spread or 0.0)))


def judge(cells: Iterable[dict[str, Any]], decisions: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every goal over all cells (an arm at a load): how many met it, and the one that is furthest from it.

    `cells_within_goal` are those that need no spread to be excused by.

    `cells` hold `arm`, `load` and `errors`, as `errors.errors` makes them; `decisions` hold `load` and the fields of
    `decisions.decide`. The worst cell has the largest share of what it was allowed.
    """
    cells = list(cells)
    return [_over_cells(goal, cells) for goal in GOALS] + [_of_ranks(list(decisions))]


def _over_cells(goal: Goal, cells: list[dict[str, Any]]) -> dict[str, Any]:
    found = []
    for cell in cells:
        values = cell["errors"][goal.metric]
        spread = values["spread"][goal.spread] if values["spread"] else None
        found.append((Verdict.of(values[goal.error], spread, goal.limit), f"{cell['arm']} at load {cell['load']:g}"))
    return _judged(goal.words, goal.limit, found) | {"signed": goal.error == "bias"}


def _of_ranks(decisions: list[dict[str, Any]]) -> dict[str, Any]:
    """Tau as its distance from 1, so that it is judged as the errors are."""
    found = []
    for one in decisions:
        spread = None if one["aa_tau"] is None else 1 - one["aa_tau"]
        if one["tau"] is not None:
            found.append((Verdict.of(1 - one["tau"], spread, 1 - TAU_GOAL), f"load {one['load']:g}"))
    return _judged("1 − Kendall tau of arms by mean TTFT", round(1 - TAU_GOAL, 9), found) | {"signed": False}


def _judged(words: str, limit: float, found: list[tuple[Verdict, str]]) -> dict[str, Any]:
    worst, where = max(found, key=lambda one: _share(one[0], limit), default=(None, ""))
    return {
        "goal": words,
        "limit": limit,
        "met": all(verdict.met for verdict, _ in found) if found else None,
        "cells_within_goal": sum(abs(verdict.error) <= limit for verdict, _ in found),
        "cells_met": sum(verdict.met for verdict, _ in found),
        "cells": len(found),
        "worst": where,
        "worst_error": None if worst is None else worst.error,
        "worst_spread": None if worst is None else worst.spread,
    }


def _share(verdict: Verdict, limit: float) -> float:
    return abs(verdict.error) / max(limit, WITHIN_SPREAD * (verdict.spread or 0.0))

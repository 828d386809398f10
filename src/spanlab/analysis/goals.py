"""Accuracy goals of the simulator: counts of cells within a goal, and a verdict where noise allows one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from spanlab.analysis.equivalence import equivalent

#: No verdict where the engine's own repeats differ (A/A) by more than this multiple of a goal.
NOISE_LIMIT = 2.0


class Goal(NamedTuple):
    """The goal that `error` of `metric` is at most `limit`; `spread` names the same difference between repeats."""

    label: str
    metric: str
    error: str
    spread: str
    limit: float


GOALS = tuple(
    Goal(f"{error_label} of {name}", metric, error, spread, limit)
    for metric, name in (("ttft_s", "TTFT"), ("e2e_s", "E2E"))
    for error_label, error, spread, limit in (
        ("mean", "bias", "mean", 0.05),
        ("median request's error", "request_p50", "request_p50", 0.05),
        ("95th percentile of requests' errors", "request_p95", "request_p95", 0.15),
    )
)

TAU_GOAL = 0.9


class Verdict(NamedTuple):
    """One number compared with its goal.

    within  the number itself is at most the limit
    met     this is shown by the test; None where the engine's own spread is unknown or too large for a verdict
    """

    error: float
    spread: float | None
    within: bool
    met: bool | None

    @staticmethod
    def of(error: float, spread: float | None, limit: float, shown: bool = True) -> Verdict:
        """Return a verdict: met where within the limit and `shown` by a test; None where noise is too large."""
        within = abs(error) <= limit
        quiet = spread is not None and spread <= NOISE_LIMIT * limit
        return Verdict(error, spread, within, within and shown if quiet else None)


def judge(cells: Iterable[dict[str, Any]], decisions: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Judge every goal over all cells (an arm at a load): plain count, count shown, and the largest error.

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
    verdicts = []
    for cell in cells:
        values = cell["errors"][goal.metric]
        spread = values["spread"][goal.spread] if values["spread"] else None
        shown = goal.error != "bias" or equivalent(values["bias_interval"], goal.limit)
        verdict = Verdict.of(values[goal.error], spread, goal.limit, shown)
        verdicts.append((verdict, f"{cell['arm']} at {load_words(cell['load'], cell['rate_rps'])}"))
    return _judged(goal.label, goal.limit, verdicts) | {"signed": goal.error == "bias"}


def _of_ranks(decisions: list[dict[str, Any]]) -> dict[str, Any]:
    """Judge tau by its distance from 1, in the same way as errors."""
    limit, verdicts = round(1 - TAU_GOAL, 9), []
    for decision in (entry for entry in decisions if "tau" in entry):
        spread = None if decision["aa_tau"] is None else round(1 - decision["aa_tau"], 9)
        if decision["tau"] is not None:
            verdict = Verdict.of(round(1 - decision["tau"], 9), spread, limit)
            verdicts.append((verdict, load_words(decision["load"], decision["rate_rps"])))
    return _judged("1 − Kendall tau of arms by mean TTFT", limit, verdicts) | {"signed": False}


def _judged(label: str, limit: float, verdicts: list[tuple[Verdict, str]]) -> dict[str, Any]:
    worst, worst_cell = max(verdicts, key=lambda pair: abs(pair[0].error), default=(None, ""))
    return {
        "goal": label,
        "limit": limit,
        "met": _all_met([verdict.met for verdict, _ in verdicts]),
        "cells_within_goal": sum(verdict.within for verdict, _ in verdicts),
        "cells_met": sum(verdict.met is True for verdict, _ in verdicts),
        "cells_noisy": sum(verdict.met is None for verdict, _ in verdicts),
        "cells": len(verdicts),
        "worst": worst_cell,
        "worst_error": None if worst is None else worst.error,
        "worst_spread": None if worst is None else worst.spread,
    }


def load_words(share: float | None, rate_rps: float | None) -> str:
    """Return a label of a cell's load: a share of saturation, or the rate that the study set."""
    if share is not None:
        return f"load {share:g}"
    return "the given arrivals" if rate_rps is None else f"{rate_rps:g} requests/s"


def _all_met(verdicts: list[bool | None]) -> bool | None:
    if False in verdicts:
        return False
    return None if None in verdicts or not verdicts else True

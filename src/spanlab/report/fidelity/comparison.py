"""Tables that compare engine and simulator: every arm at every load, ranks of arms, goals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spanlab.analysis.goals import NOISE_LIMIT, TAU_GOAL, load_words
from spanlab.report import units
from spanlab.report.cells import number, percent, placeholder, seconds, short, signed_percent, word
from spanlab.report.fields import Field, tabulate, whole
from spanlab.report.tables import Cell, Table

Row = dict[str, Any]

CELL_NOTES = (
    "error = (simulated − measured) ÷ measured, of the means, signed; per request its size, of every request",
    "outside the hull = simulated steps outside the range that the profile was fitted to",
    "schedule match = both backends give the scheduler equal inputs: with the engine's step times, the simulator "
    "composes the same steps, which says nothing of how well it predicts those times",
)
GOAL_NOTES = (
    "within goal = plain count of cells; shown = of means, two one-sided tests over repeats at 5 % show that the error "
    "is within the goal (TOST), each cell tested alone; no verdict = one repeat, or A/A above "
    f"{NOISE_LIMIT:g} times the goal",
)
AA_NOTE = "A/A = the same between the engine's own repeats"
RANK_NOTES = (
    f"arms by mean TTFT, every pair counted, also pairs that the repeats do not separate; goal: tau ≥ {TAU_GOAL:g}",
)


def _load(row: Row) -> Cell:
    share, rate = row["load"], row["rate_rps"]
    return Cell(rate if share is None else share, load_words(share, rate))


def _bias(values: Row) -> Cell:
    bias = signed_percent(values["bias"])
    return Cell(bias.value, f"{bias.text} ({units.seconds(values['bias_s'])})")


def _verdict(goal: Row) -> Cell:
    if goal["met"] is None:
        return placeholder("no verdict" if goal["cells"] else units.MISSING)
    return Cell(goal["met"], "met" if goal["met"] else "not met")


def _worst(goal: Row) -> Cell:
    return (signed_percent if goal["signed"] else percent)(goal["worst_error"])


def _regret(row: Row) -> Cell:
    return Cell(row["regret"], f"{units.percent(row['regret'])} ({units.seconds(row['regret_s'])})")


def _count_of(counted: str, total: str) -> Callable[[Row], Cell]:
    return lambda row: Cell(row[counted], f"{row[counted]:,} of {row[total]:,}")


CELLS = (
    Field("arm", "arm", word, left=True),
    Field("load", "load", _load, whole, left=True),
    Field("ttft_measured_mean_s", "TTFT mean\nmeasured", seconds, "errors.ttft_s.measured_mean_s"),
    Field("ttft_bias", "its error\n% (absolute)", _bias, "errors.ttft_s"),
    Field("ttft_aa", "A/A", percent, "errors.ttft_s.spread.mean", 2),
    Field("ttft_request_p50", "per request\np50", percent, "errors.ttft_s.request_p50", 4),
    Field("ttft_request_p95", "per request\np95", percent, "errors.ttft_s.request_p95", 4),
    Field("ttft_request_aa_p50", "A/A\np50", percent, "errors.ttft_s.spread.request_p50", 5),
    Field("ttft_request_aa_p95", "A/A\np95", percent, "errors.ttft_s.spread.request_p95", 5),
    Field("tpot_bias", "TPOT\nerror", signed_percent, "errors.tpot_s.bias", 6),
    Field("e2e_measured_mean_s", "E2E mean\nmeasured", seconds, "errors.e2e_s.measured_mean_s", 3),
    Field("e2e_bias", "its error\n% (absolute)", _bias, "errors.e2e_s", 3),
    Field("e2e_aa", "A/A", percent, "errors.e2e_s.spread.mean", 5),
    Field("steps_alike", "schedule\nmatch", _count_of("equal", "steps"), "parity", 1),
    Field("steps_outside_hull", "outside\nthe hull", _count_of("steps_outside_hull", "simulated_steps"), whole, 7),
)
RANKS = (
    Field("load", "load", _load, whole, left=True),
    Field("rate_rps", "requests/s", short),
    Field("tau", "Kendall tau-b", number(".3f")),
    Field("aa_tau", "A/A tau", number(".3f")),
    Field("best_measured", "best, measured", word, "best", left=True),
    Field("best_simulated", "best, simulated", word, "choice", left=True),
    Field("regret", "regret", _regret, whole),
)
GOALS = (
    Field("goal", "goal", word, left=True),
    Field("limit", "at most", percent),
    Field("verdict", "verdict", _verdict, whole),
    Field("cells", "cells", number("d")),
    Field("cells_within_goal", "within goal", number("d")),
    Field("cells_met", "shown", number("d")),
    Field("cells_noisy", "no verdict", number("d")),
    Field("worst", "worst", word, left=True),
    Field("worst_error", "its error", _worst, whole),
    Field("worst_spread", "its A/A", percent),
)


def tables(summary: dict[str, Any], footer: str, notes: tuple[str, ...]) -> tuple[Table, ...]:
    """Return the table of cells and, for repeated runs, the ranks by load and the goals; `footer` is provenance."""
    repeated = any(row["repeats"] > 1 for row in summary["cells"])
    notes = (*CELL_NOTES, *([AA_NOTE] if repeated else []), *notes)
    fields = [field for field in CELLS if repeated or "A/A" not in field.heading]
    table = tabulate("compare_backends", f"engine and simulator\n{footer}", fields, summary["cells"], notes)
    if not repeated:
        return (table,)
    ranked = [row for row in summary["rates"] if "tau" in row]
    return (
        table,
        tabulate("ranks", "arms by mean TTFT, measured and simulated", RANKS, ranked, RANK_NOTES),
        tabulate("goals", "goals of the simulator", GOALS, summary["goals"], GOAL_NOTES),
    )

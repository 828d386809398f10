"""Tables that compare engine and simulator: every arm at every load, ranks of arms, goals."""

from __future__ import annotations

from typing import Any

from spanlab.analysis.goals import NOISE_LIMIT, TAU_GOAL, load_words
from spanlab.report import units
from spanlab.report.tables import MISSING, Cell, Column, Table

Row = dict[str, Any]

CELL_NOTES = (
    "error = (simulated − measured) ÷ measured, of the means, signed; per request its size, of every request",
    "outside the hull = simulated steps outside the range that the profile was fitted to",
    "schedule match = both backends give the scheduler equal inputs: with the engine's step times, the simulator "
    "composes the same steps, which says nothing of how well it predicts those times",
)
GOAL_NOTES = (
    "within goal = plain count of cells; shown = of means, two one-sided tests over repeats at 5 % show that the error "
    f"is within the goal (TOST); no verdict = one repeat, or A/A above {NOISE_LIMIT:g} times the goal",
)
AA_NOTE = "A/A = the same between the engine's own repeats"
RANK_NOTES = (
    f"arms by mean TTFT, every pair counted, also pairs that the repeats do not separate; goal: tau ≥ {TAU_GOAL:g}",
)

CELLS = (
    Column("arm", "arm", left=True),
    Column("load", "load", left=True),
    Column("ttft_measured_mean_s", "TTFT mean\nmeasured"),
    Column("ttft_bias", "its error\n% (absolute)"),
    Column("ttft_aa", "A/A", 2),
    Column("ttft_request_p50", "per request\np50", 4),
    Column("ttft_request_p95", "per request\np95", 4),
    Column("ttft_request_aa_p50", "A/A\np50", 5),
    Column("ttft_request_aa_p95", "A/A\np95", 5),
    Column("tpot_bias", "TPOT\nerror", 6),
    Column("e2e_measured_mean_s", "E2E mean\nmeasured", 3),
    Column("e2e_bias", "its error\n% (absolute)", 3),
    Column("e2e_aa", "A/A", 5),
    Column("steps_alike", "schedule\nmatch", 1),
    Column("steps_outside_hull", "outside\nthe hull", 7),
)
RANKS = (
    Column("load", "load", left=True),
    Column("rate_rps", "requests/s"),
    Column("tau", "Kendall tau-b"),
    Column("aa_tau", "A/A tau"),
    Column("best_measured", "best, measured", left=True),
    Column("best_simulated", "best, simulated", left=True),
    Column("regret", "regret"),
)
GOALS = (
    Column("goal", "goal", left=True),
    Column("limit", "at most"),
    Column("verdict", "verdict"),
    Column("cells", "cells"),
    Column("cells_within_goal", "within goal"),
    Column("cells_met", "shown"),
    Column("cells_noisy", "no verdict"),
    Column("worst", "worst", left=True),
    Column("worst_error", "its error"),
    Column("worst_spread", "its A/A"),
)


def tables(summary: dict[str, Any], footer: str, notes: tuple[str, ...]) -> tuple[Table, ...]:
    """Return the table of cells and, for repeated runs, the ranks by load and the goals; `footer` is provenance."""
    cells = tuple(_cell_row(row) for row in summary["cells"])
    repeated = any(row["repeats"] > 1 for row in summary["cells"])
    notes = (*CELL_NOTES, *([AA_NOTE] if repeated else []), *notes)
    table = Table("compare_backends", f"engine and simulator\n{footer}", CELLS, cells, notes)
    if not repeated:
        return (table.with_columns([n for n, column in enumerate(CELLS) if "A/A" not in column.heading]),)
    ranked = tuple(_rank_row(row) for row in summary["rates"] if "tau" in row)
    goals = tuple(_goal_row(row) for row in summary["goals"])
    return (
        table,
        Table("ranks", "arms by mean TTFT, measured and simulated", RANKS, ranked, RANK_NOTES),
        Table("goals", "goals of the simulator", GOALS, goals, GOAL_NOTES),
    )


def _cell_row(row: Row) -> tuple[Cell, ...]:
    ttft, tpot, e2e = (row["errors"][metric] or {} for metric in ("ttft_s", "tpot_s", "e2e_s"))
    aa, e2e_aa = ttft["spread"] or {}, e2e["spread"] or {}
    equal, steps = row["parity"]["equal"], row["parity"]["steps"]
    return (
        Cell(row["arm"], row["arm"]),
        _load(row),
        Cell(ttft["measured_mean_s"], units.seconds(ttft["measured_mean_s"])),
        _bias(ttft),
        _percent(aa.get("mean")),
        *(_percent(ttft[key]) for key in ("request_p50", "request_p95")),
        *(_percent(aa.get(key)) for key in ("request_p50", "request_p95")),
        _signed(tpot.get("bias")),
        Cell(e2e["measured_mean_s"], units.seconds(e2e["measured_mean_s"])),
        _bias(e2e),
        _percent(e2e_aa.get("mean")),
        Cell(equal, f"{equal:,} of {steps:,}"),
        Cell(row["steps_outside_hull"], f"{row['steps_outside_hull']:,} of {row['simulated_steps']:,}"),
    )


def _rank_row(row: Row) -> tuple[Cell, ...]:
    rate = row["rate_rps"]
    return (
        _load(row),
        MISSING if rate is None else Cell(rate, units.significant(rate)),
        *(MISSING if row[key] is None else Cell(row[key], f"{row[key]:.3f}") for key in ("tau", "aa_tau")),
        *(Cell(row[key], row[key]) for key in ("best", "choice")),
        Cell(row["regret"], f"{units.percent(row['regret'])} ({units.seconds(row['regret_s'])})"),
    )


def _goal_row(row: Row) -> tuple[Cell, ...]:
    counts = (row[key] for key in ("cells", "cells_within_goal", "cells_met", "cells_noisy"))
    return (
        Cell(row["goal"], row["goal"]),
        _percent(row["limit"]),
        Cell(row["met"], _verdict(row)),
        *(Cell(count, f"{count}") for count in counts),
        Cell(row["worst"], row["worst"]),
        (_signed if row["signed"] else _percent)(row["worst_error"]),
        _percent(row["worst_spread"]),
    )


def _load(row: Row) -> Cell:
    share, rate = row["load"], row["rate_rps"]
    return Cell(rate if share is None else share, load_words(share, rate))


def _verdict(goal: Row) -> str:
    if goal["met"] is None:
        return "no verdict" if goal["cells"] else units.MISSING
    return "met" if goal["met"] else "not met"


def _bias(values: Row) -> Cell:
    return Cell(values["bias"], f"{_signed(values['bias']).text} ({units.seconds(values['bias_s'])})")


def _signed(value: float | None) -> Cell:
    return MISSING if value is None else Cell(value, f"{100 * value:+.1f} %")


def _percent(value: float | None) -> Cell:
    return Cell(value, units.percent(value))

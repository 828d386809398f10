"""Engine beside simulator for the terminal: every arm at every load, then goals and ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from spanlab.fidelity.goals import NOISE_LIMIT, TAU_GOAL
from spanlab.report import units

Row = dict[str, Any]


def signed(value: float | None) -> str:
    """A share in percent with its sign: +4.2 %."""
    return units.MISSING if value is None else f"{100 * value:+.1f} %"


def _gap(metric: str, key: str, text: Callable[[float | None], str]) -> Callable[[Row], str]:
    return lambda row: text((row["errors"][metric] or {}).get(key))


def _spread(metric: str, key: str) -> Callable[[Row], str]:
    return lambda row: units.percent(((row["errors"][metric] or {}).get("spread") or {}).get(key))


def _bias(metric: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        values = row["errors"][metric]
        return f"{signed(values['bias'])} ({units.seconds(values['bias_s'])})" if values else units.MISSING

    return text


def _percentiles(metric: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        values = row["errors"][metric]
        return f"{units.percent(values['request_p50'])}, {units.percent(values['request_p95'])}"

    return text


def _spreads(metric: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        own = row["errors"][metric]["spread"]
        return f"{units.percent(own['request_p50'])}, {units.percent(own['request_p95'])}" if own else units.MISSING

    return text


def _parity(row: Row) -> str:
    return f"{row['parity']['equal']:,} of {row['parity']['steps']:,}"


COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("TTFT mean\nmeasured", _gap("ttft_s", "measured_mean_s", units.seconds)),
    ("its error\n% (absolute)", _bias("ttft_s")),
    ("A/A", _spread("ttft_s", "mean")),
    ("per request\np50, p95", _percentiles("ttft_s")),
    ("A/A\np50, p95", _spreads("ttft_s")),
    ("TPOT\nerror", _gap("tpot_s", "bias", signed)),
    ("E2E mean\nmeasured", _gap("e2e_s", "measured_mean_s", units.seconds)),
    ("its error\n% (absolute)", _bias("e2e_s")),
    ("A/A", _spread("e2e_s", "mean")),
    ("steps\nalike", _parity),
    ("outside\nthe hull", lambda row: f"{row['steps_outside_hull']:,} of {row['simulated_steps']:,}"),
)

NOTES = (
    "error = (simulated − measured) ÷ measured, of the means, signed; per request its size, of every "
    "request; A/A = the same between the engine's own repeats; steps alike = both drivers feed one "
    "scheduler alike: given the engine's step times, the simulator composes the same steps, which says "
    "nothing of how well it predicts those times; outside the hull = simulated steps with more of "
    "something than the profile was fitted to"
)


def cells_table(rows: list[Row]) -> Group:
    """One line per arm and load."""
    repeated = any(row["repeats"] > 1 for row in rows)
    columns = [column for column in COLUMNS if repeated or not column[0].startswith("A/A")]
    table = _table(("load", "arm"), [heading for heading, _ in columns])
    before = None
    for row in rows:
        load = load_words(row)
        if before not in (None, load):
            table.add_section()
        shown = "" if load == before else load
        table.add_row(Text(shown), Text(row["arm"], style="bold"), *(text(row) for _, text in columns))
        before = load
    return Group(table, Text(), Text(NOTES, style="dim"))


def load_words(row: Row) -> str:
    """The load of a cell: a share of saturation, or the rate that the study set."""
    if row["load"] is not None:
        return f"{row['load']:g}"
    return units.MISSING if row["rate_rps"] is None else f"{row['rate_rps']:g}/s"


def goals_table(goals: list[Row]) -> Group:
    """Every goal: plain counts first, then the verdict and the cell with the largest error."""
    headings = ["within goal", "shown", "no verdict", "worst", "its error", "its A/A"]
    table = _table(("goal", "", "verdict"), headings)
    for goal in goals:
        error = (signed if goal["signed"] else units.percent)(goal["worst_error"])
        worst = (goal["worst"], error, units.percent(goal["worst_spread"]))
        counts = [f"{goal[key]} of {goal['cells']}" for key in ("cells_within_goal", "cells_met", "cells_noisy")]
        table.add_row(goal["goal"], f"≤ {units.percent(goal['limit'])}", verdict(goal), *counts, *worst)
    return Group(table, Text(GOAL_NOTES, style="dim"))


GOAL_NOTES = (
    "within goal = plain count of cells; shown = of means, two one-sided tests over repeats at 5 % show "
    "that the error is within the goal (TOST); no verdict = one repeat, or A/A above "
    f"{NOISE_LIMIT:g} times the goal"
)


def verdict(goal: Row) -> str:
    """In words."""
    if goal["met"] is None:
        return "no verdict" if goal["cells"] else units.MISSING
    return "met" if goal["met"] else "not met"


def decisions_table(decisions: list[Row]) -> Group:
    """By load: do both rank the arms alike, and what does the simulator's choice cost."""
    headings = ["Kendall tau-b", "A/A tau", "best, measured", "best, simulated", "regret"]
    table = _table(("load",), headings)
    for one in decisions:
        taus = [units.MISSING if one[key] is None else f"{one[key]:.3f}" for key in ("tau", "aa_tau")]
        regret = f"{units.percent(one['regret'])} ({units.seconds(one['regret_s'])})"
        table.add_row(f"{one['load']:g}", *taus, one["best"], one["choice"], regret)
    note = f"arms by mean TTFT, every pair counted, also what the repeats do not tell apart; goal: tau ≥ {TAU_GOAL:g}"
    return Group(table, Text(note, style="dim"))


def _table(names: tuple[str, ...], headings: list[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    for name in names:
        table.add_column(name, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table

"""Tables of the analysis `policies`: a ranking of all rules, the best rule of each family, and every number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spanlab.analysis.policies import RuleResult, best_of, lead
from spanlab.report import cells
from spanlab.report.policies.points import PolicyPoint, panels_of
from spanlab.report.tables import MISSING, Cell, Column, Table

_BOUND_NOTE = (
    "offline bound = reuse that no cache of the arm's memory and unit can exceed in this order of requests; "
    "of bound = token hit rate ÷ offline bound"
)
_TTFT_NOTE = (
    "mean TTFT − bound = how far the mean TTFT lies above that of requests which never queue and reuse all that the "
    "memory allows"
)
_LOST_NOTE = (
    "lost to = the largest cause as a share of the prompt tokens, but never seen and last token, which no rule avoids"
)
_RULE_COLUMNS = (
    Column("token_hit_rate", "token\nhit rate"),
    Column("of_bound", "of offline\nbound"),
    Column("regret_points", "regret,\npoints", 2),
    Column("ttft_regret_s", "mean TTFT\n− bound", 4),
    Column("ttft_p50_s", "TTFT\np50"),
    Column("ttft_p95_s", "TTFT\np95"),
    Column("resident_bytes", "resident", 3),
    Column("lost_to", "lost to", 1, left=True),
)


def ranking_table(points: Sequence[PolicyPoint]) -> Table:
    """Return a row per rule, best first: the share of the offline bound by workload, mean over budgets."""
    panels = panels_of(points)
    reached = {panel: _reached(panel_points) for panel, panel_points in panels.items()}
    families = {rule.arm: rule.family for point in points for rule in point.rules}
    means = {arm: _mean([reached[panel].get(arm) for panel in panels]) for arm in families}
    order = sorted(families, key=lambda arm: means[arm] or 0.0, reverse=True)
    columns = (
        Column("arm", "rule", left=True),
        Column("family", "family", left=True),
        *(Column(f"of_bound_{panel.replace(' ', '_')}", panel.replace("_", " ")) for panel in panels),
        Column("of_bound_mean", "mean"),
    )
    rows = [
        (
            cells.word(arm),
            cells.word(families[arm]),
            *(cells.percent(reached[panel].get(arm)) for panel in panels),
            cells.percent(means[arm]),
        )
        for arm in order
    ]
    budgets = ", ".join(f"{gib:g}" for gib in dict.fromkeys(point.gib for point in points) if gib is not None)
    note = f"each number is a mean over budgets{f' of {budgets} GiB' if budgets else ''} and seeds"
    return Table("policies", "Token hit rate ÷ offline bound, by rule", columns, tuple(rows), (_BOUND_NOTE, note))


def _reached(points: Sequence[PolicyPoint]) -> dict[str, float | None]:
    """Return each rule's mean share of the offline bound over points; None where a point has no bound."""
    shares: dict[str, list[float | None]] = {}
    for point in points:
        for rule in point.rules:
            shares.setdefault(rule.arm, []).append(rule.of_bound)
    return {arm: _mean(rule_shares) for arm, rule_shares in shares.items()}


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return float(np.mean(present)) if len(present) == len(values) else None


def best_table(points: Sequence[PolicyPoint]) -> Table:
    """A row per point and family: its best rule, and its lead over the best rule of the first family."""
    columns = (
        Column("point", "point", left=True),
        Column("family", "family", left=True),
        Column("arm", "best rule", left=True),
        *_RULE_COLUMNS[:1],
        Column("lead_points", "lead over\nthe first, points"),
        *_RULE_COLUMNS[1:],
    )
    rows = []
    for point in points:
        best = best_of(point.rules)
        first = next(iter(best.values()))
        for family, rule in best.items():
            hit_rate, *remaining = _numbers(rule)
            named = cells.word(point.name), cells.word(family), cells.word(rule.arm)
            rows.append((*named, hit_rate, MISSING if rule is first else _lead(rule, first), *remaining))
    notes = (
        "best rule = the one of the family that reuses most here; lead = points of prompt tokens that it reuses more "
        "than the best rule of the first family, same arrivals; [a, b] = 95 % interval over seeds, Student's t",
        _BOUND_NOTE,
        _TTFT_NOTE,
        _LOST_NOTE,
    )
    return Table("policies_best", "The best rule of each family", columns, tuple(rows), notes)


def _lead(rule: RuleResult, first: RuleResult) -> Cell:
    difference = lead(rule, first)
    if difference.low is None or difference.high is None:
        return Cell(difference.mean, f"{difference.mean:+.1f}")
    return Cell(difference.mean, f"{difference.mean:+.1f} [{difference.low:+.1f}, {difference.high:+.1f}]")


def rules_table(points: Sequence[PolicyPoint]) -> Table:
    """Every rule at every point, for the page, CSV and the tracker."""
    columns = (Column("point", "point", left=True), Column("arm", "rule", left=True), *_RULE_COLUMNS)
    rows = tuple(
        (cells.word(point.name), cells.word(rule.arm), *_numbers(rule)) for point in points for rule in point.rules
    )
    return Table("policies_rules", "Every rule at every point", columns, rows, (_BOUND_NOTE, _TTFT_NOTE, _LOST_NOTE))


def _numbers(rule: RuleResult) -> tuple[Cell, ...]:
    rate = rule.hit_rate
    ends = None if rate.low is None or rate.high is None else (rate.low, rate.high)
    regret = None if rule.offline is None else 100 * (rule.offline - rate.mean)
    cause = rule.lost.replace("_", " ")
    return (
        cells.percent_between(rate.mean, ends),
        cells.percent(rule.of_bound),
        MISSING if regret is None else Cell(regret, f"{regret:.1f}"),
        cells.seconds(rule.ttft_regret_s),
        cells.seconds(rule.ttft_s["p50"]),
        cells.seconds(rule.ttft_s["p95"]),
        cells.byte_size(rule.resident),
        Cell(rule.lost, f"{cause}, {100 * rule.lost_share:.1f} %") if rule.lost else MISSING,
    )

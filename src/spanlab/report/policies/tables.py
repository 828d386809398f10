"""Tables of the analysis `policies`: a ranking of all rules, the best rule of each family, and every number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spanlab.analysis.policies import RuleResult, best_of, lead
from spanlab.report import cells
from spanlab.report.cells import byte_size, one_decimal, percent, percent_interval, seconds, word
from spanlab.report.fields import Field, tabulate
from spanlab.report.policies.points import PolicyPoint, panels_of
from spanlab.report.tables import MISSING, Cell, Table
from spanlab.report.units import Ends

_BOUND_NOTE = (
    "offline bound = reuse that no cache of the arm's memory and unit can exceed in this order of requests; "
    "of bound = token hit rate ÷ offline bound"
)
_TTFT_NOTE = (
    "mean TTFT − bound = how far the mean TTFT lies above that of requests which never queue and reuse all that the "
    "memory allows"
)
_LOST_NOTE = (
    "lost to = the largest cause of tokens that are not reused, as a share of the prompt tokens; causes that no rule "
    "avoids are left out: never seen, out of reach and last token"
)


def _lost(rule: RuleResult) -> Cell:
    cause = rule.lost.replace("_", " ")
    return Cell(rule.lost, f"{cause}, {100 * rule.lost_share:.1f} %") if rule.lost else MISSING


def _regret(rule: RuleResult) -> float | None:
    return None if rule.offline is None else 100 * (rule.offline - rule.hit_rate.mean)


_RULE_FIELDS = (
    Field("token_hit_rate", "token\nhit rate", percent_interval, "rule.hit_rate"),
    Field("of_bound", "of offline\nbound", percent, "rule.of_bound"),
    Field("regret_points", "regret,\npoints", one_decimal, lambda row: _regret(row["rule"]), 2),
    Field("ttft_regret_s", "mean TTFT\n− bound", seconds, "rule.ttft_regret_s", 4),
    Field("ttft_p50_s", "TTFT\np50", seconds, "rule.ttft_s.p50"),
    Field("ttft_p95_s", "TTFT\np95", seconds, "rule.ttft_s.p95"),
    Field("resident_bytes", "resident", byte_size, "rule.resident", 3),
    Field("lost_to", "lost to", _lost, "rule", 1, left=True),
)


def ranking_table(points: Sequence[PolicyPoint]) -> Table:
    """Return a row per rule, best first: the share of the offline bound by workload, mean over budgets."""
    panels = panels_of(points)
    reached = {panel: _reached(panel_points) for panel, panel_points in panels.items()}
    families = {rule.arm: rule.family for point in points for rule in point.rules}
    means = {arm: _mean([reached[panel].get(arm) for panel in panels]) for arm in families}
    order = sorted(families, key=lambda arm: means[arm] or 0.0, reverse=True)
    names = {panel: f"of_bound_{panel.replace(' ', '_')}" for panel in panels}
    rows = [
        {"arm": arm, "family": families[arm], "of_bound_mean": means[arm]}
        | {name: reached[panel].get(arm) for panel, name in names.items()}
        for arm in order
    ]
    fields = (
        Field("arm", "rule", word, left=True),
        Field("family", "family", word, left=True),
        *(Field(name, panel.replace("_", " "), percent) for panel, name in names.items()),
        Field("of_bound_mean", "mean", percent),
    )
    budgets = ", ".join(f"{gib:g}" for gib in dict.fromkeys(point.gib for point in points) if gib is not None)
    note = f"each number is a mean over budgets{f' of {budgets} GiB' if budgets else ''} and seeds"
    return tabulate("policies", "Token hit rate ÷ offline bound, by rule", fields, rows, (_BOUND_NOTE, note))


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
    fields = (
        Field("point", "point", word, left=True),
        Field("family", "family", word, "rule.family", left=True),
        Field("arm", "best rule", word, "rule.arm", left=True),
        _RULE_FIELDS[0],
        Field("lead_points", "lead over\nthe first, points", cells.estimate(_signed), "lead"),
        *_RULE_FIELDS[1:],
    )
    rows = []
    for point in points:
        first, *others = best_of(point.rules).values()
        rows.append({"point": point.name, "rule": first, "lead": None})
        rows += [{"point": point.name, "rule": rule, "lead": lead(rule, first)} for rule in others]
    notes = (
        "best rule = the one of the family that reuses most here; lead = points of prompt tokens that it reuses more "
        "than the best rule of the first family, same arrivals; [a, b] = 95 % interval over seeds, Student's t",
        _BOUND_NOTE,
        _TTFT_NOTE,
        _LOST_NOTE,
    )
    return tabulate("policies_best", "The best rule of each family", fields, rows, notes)


def _signed(points: float, ends: Ends | None) -> str:
    return f"{points:+.1f}" if ends is None else f"{points:+.1f} [{ends[0]:+.1f}, {ends[1]:+.1f}]"


def rules_table(points: Sequence[PolicyPoint]) -> Table:
    """Every rule at every point, for the page, CSV and the tracker."""
    fields = (
        Field("point", "point", word, left=True),
        Field("arm", "rule", word, "rule.arm", left=True),
        *_RULE_FIELDS,
    )
    rows = [{"point": point.name, "rule": rule} for point in points for rule in point.rules]
    notes = (_BOUND_NOTE, _TTFT_NOTE, _LOST_NOTE)
    return tabulate("policies_rules", "Every rule at every point", fields, rows, notes)

"""The points of a sweep for the analysis `policies`: rules by workload and budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from spanlab.analysis.policies import RuleResult
from spanlab.report.sweep.data import SweepPoint

BUDGET = "store.total_gib"


@dataclass(frozen=True)
class PolicyPoint:
    """All rules at one point.

    `panel`  the values of all swept settings except the budget, or the workload if there are none
    `gib`    the budget; None without a limit
    """

    panel: str
    gib: float | None
    rules: tuple[RuleResult, ...]

    @property
    def name(self) -> str:
        """Panel and budget as text."""
        return self.panel if self.gib is None else f"{self.panel}, {self.gib:g} GiB"


def policy_points(points: Sequence[SweepPoint]) -> list[PolicyPoint]:
    """Return the results of the analysis at the points that ran."""
    return [_point(point, point.summary) for point in points if point.summary is not None]


def _point(point: SweepPoint, summary: Mapping[str, Any]) -> PolicyPoint:
    values = [value for key, value in point.settings.items() if key != BUDGET]
    panel = " ".join(values) or summary["workload"]["kind"]
    findings = summary["policies"]
    return PolicyPoint(panel, findings["budget_gib"], tuple(map(rule_of, findings["rules"])))


def rule_of(stored: Mapping[str, Any]) -> RuleResult:
    """Return a rule at a point from its entry in `summary.json`."""
    values = {field.name: stored[field.name] for field in fields(RuleResult)}
    return RuleResult(**values | {"hit_rates": tuple(stored["hit_rates"])})


def panels_of(points: Sequence[PolicyPoint]) -> dict[str, list[PolicyPoint]]:
    """Group points by panel, in the given order."""
    panels: dict[str, list[PolicyPoint]] = {}
    for point in points:
        panels.setdefault(point.panel, []).append(point)
    return panels

"""The points of a sweep as the analysis `policies` shows them: rules by workload and budget."""

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

    `panel`  the values of every swept setting but the budget, or else the workload
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
    """What the analysis left of points that ran."""
    return [_point(point, point.summary) for point in points if point.summary is not None]


def _point(point: SweepPoint, summary: Mapping[str, Any]) -> PolicyPoint:
    others = [value for key, value in point.settings.items() if key != BUDGET]
    panel = " ".join(others) or summary["workload"]["kind"]
    told = summary["policies"]
    return PolicyPoint(panel, told["budget_gib"], tuple(map(rule_of, told["rules"])))


def rule_of(told: Mapping[str, Any]) -> RuleResult:
    """A rule at a point, from what `summary.json` holds of it."""
    """A rule of a point, as `summary.json` holds it."""
    own = {field.name: told[field.name] for field in fields(RuleResult)}
    return RuleResult(**own | {"hit_rates": tuple(told["hit_rates"])})


def panels_of(points: Sequence[PolicyPoint]) -> dict[str, list[PolicyPoint]]:
    """Points by panel, in the order given."""
    panels: dict[str, list[PolicyPoint]] = {}
    for point in points:
        panels.setdefault(point.panel, []).append(point)
    return panels

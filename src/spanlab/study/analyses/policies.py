"""The analysis `policies`: caching rules by family, at one point and over all points of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from spanlab.analysis.policies import RuleResult, rule_result
from spanlab.report.data import ArmData
from spanlab.report.policies.figure import draw_policies
from spanlab.report.policies.points import PolicyPoint, policy_points
from spanlab.report.policies.tables import best_table, ranking_table, rules_table
from spanlab.report.sweep.data import SweepPoint, footer_of
from spanlab.settings.analyses import ANALYSES, OF_POINTS
from spanlab.study.analyses.of_points import point_entries
from spanlab.study.findings import Findings, Finished

FIGURES = {"policies_tokens": "token_hit_rate", "policies_ttft": "ttft_mean_s"}


@ANALYSES.register("policies")
def policies_of_study(finished: Finished) -> Findings:
    """Return the rules of one study; arms outside all families, such as a baseline, are left out."""
    families = {arm: family for family, arms in finished.study.families.items() for arm in arms}
    order = list(finished.study.families)
    arms = [result.data for result in finished.results if result.data.name in families]
    rules = sorted((_rule(arm, families[arm.name]) for arm in arms), key=lambda rule: order.index(rule.family))
    gib = finished.study.store.total_gib
    points = [PolicyPoint(finished.study.workload.kind, gib, tuple(rules))]
    entry = {"budget_gib": gib, "rules": [rule.plain() for rule in rules]}
    return Findings({"policies": entry}, (best_table(points),), (rules_table(points),))


def _rule(arm: ArmData, family: str) -> RuleResult:
    seeds = np.unique(arm.columns["seed"])
    reused, prompt = (
        np.array([arm.columns[f"{name}_tokens"][arm.columns["seed"] == seed].sum() for seed in seeds])
        for name in ("reused", "prompt")
    )
    return rule_result(arm.name, family, arm.summary, (reused / prompt).tolist())


@OF_POINTS.register("policies")
def policies_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return all points: each rule's share of the offline bound, and two figures over resident bytes."""
    rule_points, drawing = policy_points(points), draw_policies
    return Findings(
        summary={"policies": point_entries(points, "policies")},
        tables=(ranking_table(rule_points), best_table(rule_points)),
        further=(rules_table(rule_points),),
        figures={name: partial(drawing, rule_points, footer_of(points), measure) for name, measure in FIGURES.items()},
    )

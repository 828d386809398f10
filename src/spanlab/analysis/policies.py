"""Comparison of caching rules: the best rule of each family, and its lead over another rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.records import LOSS_CAUSES
from spanlab.stats import Interval, t_interval

Floats = NDArray[np.float64]

#: Causes of lost tokens that no rule can avoid.
UNAVOIDABLE = ("never_seen", "out_of_reach", "last_token")


@dataclass(frozen=True)
class RuleResult:
    """One rule at one point of a study.

    `hit_rates`   reused ÷ prompt tokens, by seed
    `offline`     upper bound of the hit rate of any cache with this unit and memory; None where unknown
    `infinite`    share of the prompt tokens that an infinite cache reuses
    `resident`    bytes of KV and states, mean over time and seeds
    `ttft_s`      mean, p50 and p95; None where the queue grows, or there are too few requests
    `ttft_regret_s`  mean TTFT - its lower bound for such caches; None as `offline`, and where the queue grows
    `lost`        the avoidable cause to which most tokens were lost; empty where none were
    `lost_share`  its share of the prompt tokens
    """

    arm: str
    family: str
    hit_rates: tuple[float, ...]
    offline: float | None
    infinite: float
    resident: float
    ttft_s: Mapping[str, float | None]
    ttft_regret_s: float | None
    lost: str
    lost_share: float

    @property
    def hit_rate(self) -> Interval:
        """Mean over seeds with its 95 % interval, clipped to 0 to 1."""
        return t_interval(self.hit_rates).clipped()

    @property
    def of_bound(self) -> float | None:
        """Hit rate as a share of the offline bound."""
        return self.hit_rate.mean / self.offline if self.offline else None

    def plain(self) -> dict[str, Any]:
        """Return the result as an entry of `summary.json`."""
        return asdict(self) | {"hit_rate": self.hit_rate._asdict(), "of_bound": self.of_bound}


def rule_result(arm: str, family: str, summary: Mapping[str, Any], hit_rates: Sequence[float]) -> RuleResult:
    """Return the result of one rule from the arm's entry in `summary.json`."""
    tokens, bounds, sizes = summary["tokens"], summary["bounds"], summary["bytes"]
    lost = {cause: tokens["lost_by_cause"][cause] for cause in LOSS_CAUSES if cause not in UNAVOIDABLE}
    main = max(lost, key=lambda cause: lost[cause])
    regret = bounds["regret_points"]
    return RuleResult(
        arm=arm,
        family=family,
        hit_rates=tuple(hit_rates),
        offline=None if regret is None else summary["token_hit_rate"] + regret / 100,
        infinite=bounds["infinite_prefix_tokens"] / tokens["prompt"],
        resident=sizes["kv_resident_mean"] + sizes["state_resident_mean"],
        ttft_regret_s=None if summary["ttft_s"]["mean"] is None else bounds["ttft_regret_s"],
        ttft_s={name: summary["ttft_s"][name] for name in ("mean", "p50", "p95")},
        lost=main if lost[main] else "",
        lost_share=lost[main] / tokens["prompt"],
    )


def best_of(rules: Sequence[RuleResult]) -> dict[str, RuleResult]:
    """Return the rule with the highest hit rate by family; families in the order of their first rules."""
    families = dict.fromkeys(rule.family for rule in rules)
    rules_by_family = {family: [rule for rule in rules if rule.family == family] for family in families}
    return {family: max(members, key=lambda rule: rule.hit_rate.mean) for family, members in rules_by_family.items()}


def lead(rule: RuleResult, other: RuleResult) -> Interval:
    """Return the lead of a rule over another in percentage points of hit rate, paired by seed; Student's t."""
    return t_interval(lead_by_seed(rule, other))


def lead_by_seed(rule: RuleResult, other: RuleResult) -> Floats:
    """Return the lead of a rule over another in percentage points of hit rate, shape (seeds,)."""
    points: Floats = 100 * (np.array(rule.hit_rates) - np.array(other.hit_rates))
    return points


def held_out_lead_by_seed(rules: Sequence[RuleResult], others: Sequence[RuleResult]) -> Floats:
    """Return the lead of the best of `rules` over the best of `others`, both chosen on all other seeds; shape (seeds,).

    So no seed judges a rule that it has chosen. Needs two seeds.
    """
    rates, other_rates = (np.array([rule.hit_rates for rule in group]) for group in (rules, others))
    other_seeds = ~np.eye(rates.shape[1], dtype=bool)
    leads = [
        rates[rates[:, seeds].mean(axis=1).argmax(), seed]
        - other_rates[other_rates[:, seeds].mean(axis=1).argmax(), seed]
        for seed, seeds in enumerate(other_seeds)
    ]
    return 100 * np.array(leads)

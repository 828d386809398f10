"""Rules of caching side by side: the best of each family, and by how much it reuses more than that of the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from spanlab.records import LOSS_CAUSES
from spanlab.stats import Interval, t_interval

#: Losses that no rule can avoid.
UNAVOIDABLE = ("never_seen", "last_token")


@dataclass(frozen=True)
class RuleResult:
    """One rule at one point of a study.

    `hit_rates`   reused ÷ prompt tokens, by seed
    `offline`     share of the prompt tokens that no cache of its unit and memory can exceed; None where none is known
    `infinite`    share of the prompt tokens that a cache without limit reuses
    `resident`    bytes of KV and states, mean over time and seeds
    `ttft_s`      mean, p50 and p95; None where the queue grows, or too few requests tell
    `ttft_regret_s`  mean TTFT - the bound below which no such cache comes; None as `offline`, and where the queue grows
    `lost`        the largest avoidable cause of tokens that were not reused; empty where nothing was lost
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
        """Mean over seeds with its 95 % interval, cut to shares."""
        mean, low, high = t_interval(self.hit_rates)
        return Interval(mean, None if low is None else max(low, 0.0), None if high is None else min(high, 1.0))

    @property
    def of_bound(self) -> float | None:
        """Share of the offline bound that is reached."""
        return self.hit_rate.mean / self.offline if self.offline else None

    def plain(self) -> dict[str, Any]:
        """The result as `summary.json` holds it."""
        return asdict(self) | {"hit_rate": self.hit_rate._asdict(), "of_bound": self.of_bound}


def rule_result(arm: str, family: str, summary: Mapping[str, Any], hit_rates: Sequence[float]) -> RuleResult:
    """One rule by the arm's entry in `summary.json`."""
    tokens, bounds, held = summary["tokens"], summary["bounds"], summary["bytes"]
    lost = {cause: tokens["lost_by_cause"][cause] for cause in LOSS_CAUSES if cause not in UNAVOIDABLE}
    main = max(lost, key=lambda cause: lost[cause])
    regret = bounds["regret_points"]
    return RuleResult(
        arm=arm,
        family=family,
        hit_rates=tuple(hit_rates),
        offline=None if regret is None else summary["token_hit_rate"] + regret / 100,
        infinite=bounds["infinite_prefix_tokens"] / tokens["prompt"],
        resident=held["kv_resident_mean"] + held["state_resident_mean"],
        ttft_regret_s=None if summary["ttft_s"]["mean"] is None else bounds["ttft_regret_s"],
        ttft_s={name: summary["ttft_s"][name] for name in ("mean", "p50", "p95")},
        lost=main if lost[main] else "",
        lost_share=lost[main] / tokens["prompt"],
    )


def best_of(rules: Sequence[RuleResult]) -> dict[str, RuleResult]:
    """By family, the rule that reuses most; families in the order of their first rules."""
    families = dict.fromkeys(rule.family for rule in rules)
    own = {family: [rule for rule in rules if rule.family == family] for family in families}
    return {family: max(members, key=lambda rule: rule.hit_rate.mean) for family, members in own.items()}


def lead(rule: RuleResult, other: RuleResult) -> Interval:
    """Points of prompt tokens that a rule reuses more than another, paired by seed; Student's t."""
    return t_interval(100 * (np.array(rule.hit_rates) - np.array(other.hit_rates)))

"""The best rule of each family, and its lead."""

from dataclasses import replace

import pytest

from spanlab.analyses.policies import RuleResult, best_of, held_out_lead_by_seed, lead, rule_result
from spanlab.records import LOSS_CAUSES

LOST = dict.fromkeys(LOSS_CAUSES, 0) | {"never_seen": 300, "kv_evicted": 50, "alignment": 90, "last_token": 100}
SUMMARY = {
    "tokens": {"prompt": 1000, "lost_by_cause": LOST},
    "token_hit_rate": 0.46,
    "bounds": {"regret_points": 14.0, "infinite_prefix_tokens": 700, "ttft_regret_s": 0.15},
    "bytes": {"kv_resident_mean": 3.0, "state_resident_mean": 4.0},
    "ttft_s": {"mean": 0.2, "p50": 0.1, "p95": None, "p99": None},
}


def rule(arm: str, family: str, *rates: float) -> RuleResult:
    return replace(rule_result(arm, family, SUMMARY, rates))


def test_a_rule_result_follows_from_its_summary():
    result = rule("lru", "engines", 0.44, 0.48)
    assert (result.lost, result.lost_share) == ("alignment", 0.09)
    assert (result.offline, result.infinite, result.resident) == (pytest.approx(0.6), 0.7, 7.0)
    assert result.of_bound == pytest.approx(0.46 / 0.6)
    assert result.ttft_s == {"mean": 0.2, "p50": 0.1, "p95": None}
    assert result.ttft_regret_s == 0.15
    assert result.plain()["hit_rate"]["mean"] == pytest.approx(0.46)


def test_an_arm_without_a_bound_reaches_no_share_of_it():
    unknown = SUMMARY | {"bounds": SUMMARY["bounds"] | {"regret_points": None}}
    assert rule_result("mine", "ours", unknown, (0.5,)).of_bound is None


def test_the_best_rule_of_a_family_reuses_most():
    result = best_of([rule("a", "x", 0.1, 0.3), rule("b", "y", 0.9, 0.9), rule("c", "x", 0.25, 0.25)])
    assert {family: best.arm for family, best in result.items()} == {"x": "c", "y": "b"}
    assert list(result) == ["x", "y"]


def test_leads_are_paired_by_seed():
    """Seeds differ by much more than the rules; paired, the lead is exact."""
    result = lead(rule("a", "x", 0.2, 0.5, 0.8), rule("b", "y", 0.1, 0.4, 0.7))
    assert (result.mean, result.low, result.high) == pytest.approx((10.0, 10.0, 10.0))


def test_pairs_keep_the_order_of_seeds():
    """The middle seed has the highest rates: sorted rates of the second rule would give leads of 10, 40 and -20."""
    result = lead(rule("a", "x", 0.2, 0.8, 0.5), rule("b", "y", 0.1, 0.7, 0.4))
    assert (result.mean, result.low, result.high) == pytest.approx((10.0, 10.0, 10.0))


def test_no_seed_judges_a_rule_that_it_chose():
    """By hand. Without seed 0, a has 0.35 and b 0.4; without seed 1, 0.5 and 0.4; without seed 2, 0.45 and 0.4."""
    rules = [rule("a", "x", 0.6, 0.3, 0.4), rule("b", "x", 0.4, 0.4, 0.4)]
    others = [rule("c", "y", 0.3, 0.2, 0.1), rule("d", "z", 0.1, 0.1, 0.25)]
    leads = held_out_lead_by_seed(rules, others)  # others: d has 0.175, c 0.2, c 0.25
    assert leads == pytest.approx([100 * (0.4 - 0.1), 100 * (0.3 - 0.2), 100 * (0.4 - 0.1)])
    assert leads.mean() < lead(rules[0], others[0]).mean + 1e-9


def test_intervals_of_rates_stay_shares():
    rate = rule("a", "x", 0.0, 1.0).hit_rate
    assert (rate.low, rate.high) == (0.0, 1.0)

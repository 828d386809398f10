"""The front page's table of rules for hybrid caches, and the leads of our rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pages import table

from spanlab.analysis.policies import RuleResult, best_of, lead
from spanlab.report.policies.points import rule_of
from spanlab.stats import Interval

Summary = Mapping[str, Any]
SHOWN_GIB = 16.0  # one of three budgets; the page of the study shows all
OURS, ONLINE = "ours", ("engines", "published")


def policies_table(summary: Summary) -> str:
    """Return the best rule of each family at `SHOWN_GIB`, with its token hit rate and its share of the bound."""
    points = [point for point in summary["policies"] if point["budget_gib"] == SHOWN_GIB]
    bests = [best_of([rule_of(entry) for entry in point["rules"]]) for point in points]
    head = (f"{SHOWN_GIB:g} GiB", *bests[0])
    names = [point["settings"]["traffic"] for point in points]
    return table(head, [(name, *map(_cell, best.values())) for name, best in zip(names, bests, strict=True)])


def _cell(rule: RuleResult) -> str:
    of_bound = "" if rule.of_bound is None else f", {100 * rule.of_bound:.0f} %"
    return f"`{rule.arm}` {100 * rule.hit_rate.mean:.0f} %{of_bound}"


def policies_claim(summary: Summary) -> str:
    """Return the points at which our best rule leads the best of engines and papers, and those at which it trails."""
    leads = {_name(point): _lead_of_ours([rule_of(entry) for entry in point["rules"]]) for point in summary["policies"]}
    ahead = [name for name, ours in leads.items() if ours.low is not None and ours.low > 0]
    behind = [name for name, ours in leads.items() if ours.high is not None and ours.high < 0]
    more = f"Our best rule reuses more than the best of engines and papers at {_some(ahead, leads)}"
    less = f"less at {_some(behind, leads)}"
    undecided = f"at the other {len(leads) - len(ahead) - len(behind)} the 95 % interval, paired by seed, includes 0"
    return f"{more}; {less}; {undecided}.\n"


def _name(point: Mapping[str, Any]) -> str:
    return f"{point['settings']['traffic']} {point['budget_gib']:g} GiB"


def _lead_of_ours(rules: Sequence[RuleResult]) -> Interval:
    """Return the lead of our best rule in points of prompt tokens."""
    best = best_of(rules)
    return lead(best[OURS], max((best[family] for family in ONLINE), key=lambda rule: rule.hit_rate.mean))


def _some(names: Sequence[str], leads: Mapping[str, Interval]) -> str:
    """Return the number of combinations, and their names with leads in points of prompt tokens."""
    each = ", ".join(f"{name} {leads[name].mean:+.1f}" for name in names)
    return f"{len(names)} of {len(leads)} combinations" + (f" ({each} points)" if names else "")

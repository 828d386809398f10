"""The best rules for hybrid caches, and the leads of our rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pages import table

from spanlab.analyses.policies import RuleResult, best_of, held_out_lead_by_seed, lead_by_seed, rule_of
from spanlab.stats import holm, t_test

Summary = Mapping[str, Any]
Leads = Mapping[str, NDArray[np.float64]]
SHOWN_GIB = 16.0  # one of three budgets; the page of the study shows all
OURS, ONLINE = "ours", ("engines", "published")
LEVEL = 0.05


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
    """Return where our best rule leads and trails the best of engines and papers, by three tests."""
    rules = {_name(point): [rule_of(entry) for entry in point["rules"]] for point in summary["policies"]}
    ours = {name: [rule for rule in group if rule.family == OURS] for name, group in rules.items()}
    online = {name: [rule for rule in group if rule.family in ONLINE] for name, group in rules.items()}
    leads = {name: lead_by_seed(_best(ours[name]), _best(online[name])) for name in rules}
    held_out = {name: held_out_lead_by_seed(ours[name], online[name]) for name in rules}
    alone = {name: values.mean() for name, values in leads.items() if t_test(values) < LEVEL}
    head = (f"test, {len(leads)} points", "ours reuses more", "ours reuses less")
    rows = (
        ("each point alone", *_counts(alone)),
        ("after Holm's correction", *_counts(_corrected(leads))),
        ("corrected, rules chosen on the other seeds", *_counts(_corrected(held_out))),
    )
    return table(head, rows)


def _name(point: Mapping[str, Any]) -> str:
    return f"{point['settings']['traffic']} {point['budget_gib']:g} GiB"


def _best(rules: Sequence[RuleResult]) -> RuleResult:
    return max(rules, key=lambda rule: rule.hit_rate.mean)


def _corrected(leads: Leads) -> dict[str, float]:
    """Return the mean leads that differ from zero after Holm's correction, in points of prompt tokens."""
    rejected = holm([t_test(values) for values in leads.values()], LEVEL)
    return {name: values.mean() for (name, values), shown in zip(leads.items(), rejected, strict=True) if shown}


def _counts(means: Mapping[str, float]) -> Iterator[str]:
    """Yield the number of leads above and below zero, with the leads themselves."""
    for sign in (1, -1):
        leads = [f"{name} {mean:+.1f}" for name, mean in means.items() if sign * mean > 0]
        yield f"{len(leads)}: {', '.join(leads)}" if leads else "0"

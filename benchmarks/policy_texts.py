"""The best rules for hybrid caches, and the leads of our rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pages import table

from spanlab.analyses.policies import RuleResult, best_of, held_out_lead_by_seed, lead_by_seed
from spanlab.stats import holm, t_test

Rows = Sequence[Mapping[str, Any]]
Leads = Mapping[str, NDArray[np.float64]]
SHOWN_GIB = 16.0  # one of three budgets; the page of the study shows all
OURS, ONLINE = "ours", ("engines", "published")
LEVEL = 0.05


def policies_table(rows: Rows) -> str:
    """Return the best rule of each family at `SHOWN_GIB`, with its token hit rate and its share of the bound."""
    points = {traffic: rules for (traffic, gib), rules in _points(rows).items() if gib == SHOWN_GIB}
    bests = [best_of(rules) for rules in points.values()]
    head = (f"{SHOWN_GIB:g} GiB", *bests[0])
    return table(head, [(name, *map(_cell, best.values())) for name, best in zip(points, bests, strict=True)])


def _points(rows: Rows) -> dict[tuple[str, float], list[RuleResult]]:
    """Return the rules of each point, by traffic and GiB."""
    points: dict[tuple[str, float], list[RuleResult]] = {}
    for row in rows:
        rules = points.setdefault((row["settings.traffic"], row["budget_gib"]), [])
        rules.append(_rule(row))
    return points


def _rule(row: Mapping[str, Any]) -> RuleResult:
    """Return a rule at a point, without its delays."""
    values = {field.name: row.get(f"rules.{field.name}") for field in fields(RuleResult)}
    rates = [value for key, value in row.items() if key.startswith("rules.hit_rates.") and value is not None]
    return RuleResult(**values | {"hit_rates": tuple(rates)})


def _cell(rule: RuleResult) -> str:
    of_bound = "" if rule.of_bound is None else f", {100 * rule.of_bound:.0f} %"
    return f"`{rule.arm}` {100 * rule.hit_rate.mean:.0f} %{of_bound}"


def policies_claim(rows: Rows) -> str:
    """Return where our best rule leads and trails the best of engines and papers, by three tests."""
    rules = {f"{traffic} {gib:g} GiB": group for (traffic, gib), group in _points(rows).items()}
    ours = {name: [rule for rule in group if rule.family == OURS] for name, group in rules.items()}
    online = {name: [rule for rule in group if rule.family in ONLINE] for name, group in rules.items()}
    leads = {name: lead_by_seed(_best(ours[name]), _best(online[name])) for name in rules}
    held_out = {name: held_out_lead_by_seed(ours[name], online[name]) for name in rules}
    alone = {name: values.mean() for name, values in leads.items() if t_test(values) < LEVEL}
    head = (f"test, {len(leads)} points", "ours reuses more", "ours reuses less")
    counts = (
        ("each point alone", *_counts(alone)),
        ("after Holm's correction", *_counts(_corrected(leads))),
        ("corrected, rules chosen on the other seeds", *_counts(_corrected(held_out))),
    )
    return table(head, counts)


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

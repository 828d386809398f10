"""What the calls of a log cost by prices of tokens, and what they would have cost with other
caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from spanlab.analyses.fixes import ExplainedArm, Fix
from spanlab.report.table import Field, Table, count, number_format, percent, tabulate, word
from spanlab.settings.analyses import PriceSettings
from spanlab.workloads.logs.log import Log

MILLION = 1e6
NAMES = {"no_cache": "no cache", "prefix": "prefix, no limit of memory or time"}


def cost_of(
    price: PriceSettings, fresh: float, cached: float, created: float = 0, output: float = 0
) -> float:
    """Return the price of tokens; `created` ones are computed and written into a cache, `fresh`
    ones only computed."""
    assert price.input is not None, "the caller has checked it"
    prices = [
        price.input if value is None else value
        for value in (price.input, price.cached, price.write)
    ]
    whole = (
        fresh * prices[0]
        + cached * prices[1]
        + created * prices[2]
        + output * (price.output or 0.0)
    )
    return whole / MILLION


def simulated_cost(price: PriceSettings, prompt: float, reused: float, output: float = 0) -> float:
    """Return the price of prompts of which a cache reuses some tokens, and stores all others."""
    return cost_of(price, 0, reused, prompt - reused, output)


def saved_money(price: PriceSettings, fix: Fix, arm: ExplainedArm) -> float | None:
    """Return how much less the prompts cost after a fix; None without prices."""
    if price.input is None:
        return None
    total = arm.facts.prompt_tokens
    before = simulated_cost(price, total, arm.rate * total)
    return before - simulated_cost(price, fix.prompt_tokens, fix.reused_tokens)


def money_of(
    price: PriceSettings, sums: Mapping[str, int] | None, reused: Mapping[str, int], log: Log
) -> dict[str, Any] | None:
    """Return what the log cost by the provider's counts, and what it would cost with caches; None
    without prices.

    `logged`  cost by the provider's counts of all requests that report one, `requests` of them;
              None without counts
    `caches`  cost of all requests by name of a cache, with the `reused` tokens of prompts; no cache
              writes none
    """
    if price.input is None:
        return None
    output = int(log.output_lens.astype(np.int64).sum())
    prompt = int(log.prompt_tokens.sum())
    costs = {name: simulated_cost(price, prompt, tokens, output) for name, tokens in reused.items()}
    costs["no_cache"] = cost_of(price, prompt, 0, 0, output)
    logged = None
    if sums is not None:
        counts = (sums[f"{kind}_tokens"] for kind in ("fresh", "cached", "created", "output"))
        logged = cost_of(price, *counts)
    return {
        "logged": logged,
        "requests": 0 if sums is None else sums["requests"],
        "prompt_tokens": prompt,
        "caches": {
            name: {"cost": cost, "reused_tokens": reused[name]} for name, cost in costs.items()
        },
    }


def money_lines(money: Mapping[str, Any] | None, arm: str) -> list[str]:
    """Return the sentence about what the log cost and would have cost; none without prices."""
    if money is None:
        return []
    compared = {
        "no_cache": "without a cache",
        arm: f"as {arm}",
        "prefix": "with prefixes without a limit",
    }
    would = ", ".join(
        f"{_amount(money['caches'][name]['cost'])} {says}" for name, says in compared.items()
    )
    if money["logged"] is None:
        return [f"by price.*, the log would cost {would}"]
    return [
        f"by price.*, the log cost {_amount(money['logged'])} as the provider counts; it would have cost {would}"
    ]


def _amount(cost: float) -> str:
    return f"{cost:,.2f}" if cost >= 1 else f"{cost:.4g}"


def money_table(summary: Mapping[str, Any]) -> Table:
    """Return what the log cost, and what it would have cost with each cache, the cheapest first."""
    money = summary["money"]
    rows = [
        {
            "cache": NAMES.get(name, name),
            "share": cache["reused_tokens"] / max(money["prompt_tokens"], 1),
            **cache,
        }
        for name, cache in sorted(money["caches"].items(), key=lambda item: item[1]["cost"])
    ]
    if money["logged"] is not None:
        sums = summary["reported"]["sums"]
        share = sums["cached_tokens"] / max(sums["prompt_tokens"], 1)
        first = {
            "cache": "counted by the provider",
            "share": share,
            "reused_tokens": sums["cached_tokens"],
        }
        rows.insert(0, first | {"cost": money["logged"]})
    fields = (
        Field("cache", "cache", word, left=True),
        Field("cost", "cost", number_format(",.4f")),
        Field("reused_tokens", "tokens\nreused", count),
        Field("share", "token\nhit rate", percent),
    )
    notes: tuple[str, ...] = (
        "costs by price.*, in its currency; a simulated cache writes all tokens that it computes, and outputs cost the "
        "same with each; other prices of longer times to live are not counted",
    )
    if money["logged"] is not None and money["requests"] < summary["requests"]:
        missing = summary["requests"] - money["requests"]
        notes = (
            *notes,
            f"{missing:,} requests report no length, and cost nothing as the provider counts",
        )
    return tabulate("money", "What the calls cost, and would have cost", fields, rows, notes)

"""Bounds on reuse beside each arm, in percent of its prompt tokens."""

from __future__ import annotations

from typing import Any

from spanlab.report import units

MEANING = (
    "infinite cache = reuse without a limit of memory, at the positions where the arm looks; offline "
    "bound = reuse that no cache with the arm's memory and unit can exceed in this order of requests; "
    "regret = offline bound − token hit rate"
)


def infinite_cache(summary: dict[str, Any]) -> str:
    """Tokens that an infinite cache reuses where the arm looks for them ÷ prompt tokens."""
    kind = "prefix" if summary["finds"] == "prefixes" else "any_position"
    return _percent(summary, f"infinite_{kind}_tokens")


def offline_bound(summary: dict[str, Any]) -> str:
    """Tokens that no cache with the arm's memory and unit can exceed ÷ prompt tokens."""
    return _percent(summary, "offline_tokens")


def regret(summary: dict[str, Any]) -> str:
    """Offline bound − token hit rate, in percentage points."""
    return f"{summary['bounds']['regret_points']:.1f}"


def _percent(summary: dict[str, Any], name: str) -> str:
    return units.percent(summary["bounds"][name] / (summary["tokens"]["prompt"] or 1))

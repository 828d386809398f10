"""Bounds on the reuse of each arm, as shares of its prompt tokens."""

from __future__ import annotations

from typing import Any

from spanlab.report import cells
from spanlab.report.measures import saturated
from spanlab.report.tables import MISSING, Cell

MEANING = (
    "infinite cache = reuse with unlimited memory, with the arm's kind of lookup; offline "
    "bound = reuse that no cache with the arm's memory and unit can exceed in this order of requests; "
    "regret = offline bound − token hit rate; TTFT − bound = mean TTFT above that of requests which never queue, are "
    "alone on the engine and compute what the best use of the memory leaves"
)


def infinite_cache(summary: dict[str, Any]) -> Cell:
    """Tokens that an infinite cache reuses with the arm's kind of lookup ÷ prompt tokens."""
    kind = "prefix" if summary["finds"] == "prefixes" else "any_position"
    return _share(summary, f"infinite_{kind}_tokens")


def offline_bound(summary: dict[str, Any]) -> Cell:
    """Tokens that no cache with the arm's memory and unit can exceed ÷ prompt tokens."""
    return _share(summary, "offline_tokens")


def regret(summary: dict[str, Any]) -> Cell:
    """Offline bound − token hit rate, in percentage points."""
    points = summary["bounds"]["regret_points"]
    return MISSING if points is None else Cell(points, f"{points:.1f}")


def ttft_regret(summary: dict[str, Any]) -> Cell:
    """Mean TTFT above the bound without queueing; missing where the queue grows."""
    return MISSING if saturated(summary) else cells.seconds(summary["bounds"]["ttft_regret_s"])


def _share(summary: dict[str, Any], name: str) -> Cell:
    tokens = summary["bounds"][name]
    return MISSING if tokens is None else cells.percent(tokens / (summary["tokens"]["prompt"] or 1))

"""Bounds on the reuse of each arm, as shares of its prompt tokens."""

from __future__ import annotations

from typing import Any

from spanlab.report.measures import saturated

MEANING = (
    "infinite cache = reuse with unlimited memory, with the arm's kind of lookup; offline "
    "bound = reuse that no cache with the arm's memory and unit can exceed in this order of requests; "
    "regret = offline bound − token hit rate; TTFT − bound = mean TTFT above that of requests which never queue, are "
    "alone on the engine and compute what the best use of the memory leaves"
)


def infinite_cache(summary: dict[str, Any]) -> float | None:
    """Tokens that an infinite cache reuses with the arm's kind of lookup ÷ prompt tokens."""
    kind = "prefix" if summary["finds"] == "prefixes" else "any_position"
    return _share(summary, f"infinite_{kind}_tokens")


def offline_bound(summary: dict[str, Any]) -> float | None:
    """Tokens that no cache with the arm's memory and unit can exceed ÷ prompt tokens."""
    return _share(summary, "offline_tokens")


def ttft_regret(summary: dict[str, Any]) -> float | None:
    """Mean TTFT above the bound without queueing, in seconds; None where the queue grows."""
    seconds: float | None = summary["bounds"]["ttft_regret_s"]
    return None if saturated(summary) else seconds


def _share(summary: dict[str, Any], name: str) -> float | None:
    tokens: int | None = summary["bounds"][name]
    return None if tokens is None else tokens / (summary["tokens"]["prompt"] or 1)

"""Counts that a server reports about a request: tokens of the prompt, and those that it read from its cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from spanlab.workloads.logs.observed import NOT_REPORTED, Usage
from spanlab.workloads.logs.source import Row

_PLACES = ("usage", "response.usage", "response.body.usage", "body.usage", "message.usage", "response.message.usage")
_GEMINI = ("usageMetadata", "response.usageMetadata", "usage_metadata", "response.usage_metadata")
_SGLANG = ("meta_info", "response.meta_info", "out.meta_info")
OUTPUTS = tuple(f"{path}.{name}" for path in _PLACES for name in ("completion_tokens", "output_tokens"))


def usage_of(row: Row) -> Usage:
    """Return what a line reports; an absent or null count is unknown, which is not zero.

    Anthropic's `input_tokens` excludes tokens read from or written to a cache; the counts of others include them.
    """
    usage = row.get(*_PLACES)
    if isinstance(usage, dict):
        return _of_usage(usage)
    for places, prompt, cached in (
        (_GEMINI, "promptTokenCount", "cachedContentTokenCount"),
        (_GEMINI, "prompt_token_count", "cached_content_token_count"),
        (_SGLANG, "prompt_tokens", "cached_tokens"),
    ):
        counts = row.get(*places)
        if isinstance(counts, dict) and prompt in counts:
            return _inclusive(_number(counts, prompt), _number(counts, cached))
    return NOT_REPORTED


def _of_usage(usage: Mapping[str, Any]) -> Usage:
    read, written = (_number(usage, f"cache_{kind}_input_tokens") for kind in ("read", "creation"))
    details = [_number(usage.get(f"{name}_tokens_details"), "cached_tokens") for name in ("prompt", "input")]
    others = [_number(usage, name) for name in ("prompt_cache_hit_tokens", "cached_tokens", "num_cached_tokens")]
    cached = next((count for count in (*details, *others) if not np.isnan(count)), np.nan)
    prompt = _number(usage, "prompt_tokens")
    if np.isnan(prompt) and "prompt_cache_miss_tokens" in usage:
        prompt = _number(usage, "prompt_cache_hit_tokens") + _number(usage, "prompt_cache_miss_tokens")
    if not np.isnan(prompt):
        return _inclusive(prompt, read if np.isnan(cached) else cached)
    prompt = _number(usage, "input_tokens")
    if {"cache_read_input_tokens", "cache_creation_input_tokens"} & set(usage) and np.isnan(details[1]):
        return Usage(prompt + read + written, read)
    return _inclusive(prompt, cached)


def _inclusive(prompt: float, cached: float) -> Usage:
    """Return counts of which one includes the other; cached tokens beyond the prompt's contradict that."""
    return NOT_REPORTED if cached > prompt else Usage(prompt, cached)


def _number(counts: Any, name: str) -> float:
    value = counts.get(name) if isinstance(counts, dict) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**31:
        return np.nan
    return float(value)

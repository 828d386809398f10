"""What the server itself reports about a log: cached tokens beside those that are possible, and lengths of prompts."""

from __future__ import annotations

from typing import Any

import numpy as np

from spanlab.offline.forest import Ints
from spanlab.study.explain.facts import Facts

SURPRISING = 0.05  # a server that reuses so much less than possible has another problem than its prompts


def reported_of(facts: Facts, reused: Ints) -> dict[str, Any] | None:
    """Return the server's counts beside ours on the same requests; None if it reports none.

    `requests`        requests with a reported number of cached tokens; the hit rates are over these
    `token_hit_rate`  reported cached tokens ÷ reported prompt tokens
    `possible`        the same ratio of the explained arm
    `prompt_tokens`   mean reported length of the requests that report one, and `counted_tokens` by our count
    """
    usage = facts.log.usage
    if usage is None:
        return None
    prompt, cached = usage.T
    counted = facts.paths.prompt_tokens
    has_prompt, has_both = ~np.isnan(prompt), ~np.isnan(prompt) & ~np.isnan(cached) & (counted > 0)
    total, ours = float(prompt[has_both].sum()), int(counted[has_both].sum())
    rates: dict[str, float | None] = {"token_hit_rate": None, "possible": None}
    if total and ours:
        rates = {
            "token_hit_rate": float(cached[has_both].sum()) / total,
            "possible": int(reused[has_both].sum()) / ours,
        }
    lengths: dict[str, float | None] = {"prompt_tokens": None, "counted_tokens": None}
    if has_prompt.any():
        lengths = {
            "prompt_tokens": float(prompt[has_prompt].mean()),
            "counted_tokens": float(counted[has_prompt].mean()),
        }
    return {"requests": int(has_both.sum()), **rates, **lengths}


def reported_lines(reported: dict[str, Any] | None, arm: str, requests: int) -> list[str]:
    """Return the first lines of the page: measured beside possible, and reported beside counted lengths."""
    if reported is None:
        return []
    lines = []
    if reported["token_hit_rate"] is not None:
        lines.append(
            f"the server reports {100 * reported['token_hit_rate']:.1f} % of the prompt tokens as cached, and "
            f"{100 * reported['possible']:.1f} % are possible as {arm} "
            f"({reported['requests']:,} of {requests:,} requests report it)"
        )
    if reported["prompt_tokens"] and reported["counted_tokens"]:
        ratio = reported["prompt_tokens"] / reported["counted_tokens"]
        lines.append(
            f"it reports {reported['prompt_tokens']:,.0f} prompt tokens per request, and the log gives "
            f"{reported['counted_tokens']:,.0f}: {ratio:.2f} times"
        )
    return lines


def is_surprising(reported: dict[str, Any] | None) -> bool:
    """Return whether the server reuses clearly less than its prompts allow."""
    if reported is None or reported["token_hit_rate"] is None:
        return False
    return bool(reported["possible"] - reported["token_hit_rate"] > SURPRISING)

"""Caches whose entries expire find what a list of entries with their times finds, request by request."""

from __future__ import annotations

import numpy as np
import pytest

from spanlab.offline.expiry import Expiry, expiring_reuse

from .test_replay import SEEDS, random_prompts, token_paths


def brute_force(prompts: list[np.ndarray], times: list[float], expiry: Expiry) -> list[tuple[int, int, int]]:
    """Return reused, expired and new tokens of each prompt, from a time for each prefix of each prompt."""
    times_of: dict[tuple[int, ...], float] = {}
    found = []
    for prompt, now in zip(prompts, times, strict=True):
        prefixes = [tuple(prompt[:length].tolist()) for length in range(1, len(prompt) + 1)]
        seen = sum(prefix in times_of for prefix in prefixes)
        alive = 0
        while alive < seen and now - times_of[prefixes[alive]] <= expiry.ttl_s:
            alive += 1
        reused = min(alive, len(prompt) - 1) // expiry.unit * expiry.unit
        if len(prompt) < expiry.least or reused < expiry.least:
            reused = 0
        found.append((reused, seen - alive, len(prompt) - seen))
        for depth, prefix in enumerate(prefixes):
            if expiry.refreshes or depth >= alive:
                times_of[prefix] = now
    return found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "expiry",
    [
        Expiry(4.0),
        Expiry(4.0, refreshes=False),
        Expiry(9.5, least=32, unit=8),
        Expiry(1e9),
    ],
)
def test_reuse_equals_a_list_of_times(seed: int, expiry: Expiry):
    prompts = random_prompts(seed)
    times = np.cumsum(np.random.default_rng(seed).exponential(1.0, len(prompts))).round(3)
    found = expiring_reuse(token_paths(prompts), np.rint(times * 1e9).astype(np.int64), expiry)
    rows = zip(found.reused.tolist(), found.expired.tolist(), found.never_seen.tolist(), strict=True)
    assert list(rows) == brute_force(prompts, times.tolist(), expiry)
    total = found.reused + found.expired + found.too_short + found.never_seen
    assert total.tolist() == [len(prompt) for prompt in prompts]

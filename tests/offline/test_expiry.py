"""Caches whose entries expire find what a list of entries with their times finds, request by request."""

from dataclasses import replace

import numpy as np
import pytest

from spanlab.offline.expiry import Expiry, expiring_reuse
from spanlab.offline.replay import EXPIRED, CacheRules, ReplayRequests, replay

from ..support.products import in_turn
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
    "expiry", [Expiry(4.0), Expiry(4.0, refreshes=False), Expiry(9.5, least=32, unit=8), Expiry(1e9)]
)
def test_reuse_equals_a_list_of_times(seed: int, expiry: Expiry):
    prompts = random_prompts(seed)
    times = np.cumsum(np.random.default_rng(seed).exponential(1.0, len(prompts))).round(3)
    found = expiring_reuse(token_paths(prompts), np.rint(times * 1e9).astype(np.int64), expiry)
    rows = zip(found.reused.tolist(), found.expired.tolist(), found.never_seen.tolist(), strict=True)
    assert list(rows) == brute_force(prompts, times.tolist(), expiry)
    total = found.reused + found.expired + found.too_short + found.never_seen
    assert total.tolist() == [len(prompt) for prompt in prompts]


def limited(prompts: list[np.ndarray], times: list[float], blocks: int, size: int, ttl_s: float) -> list[int]:
    """Return reused tokens of each prompt in a list of blocks with the times of their last use, by brute force."""
    resident: list[tuple[bytes, float]] = []
    reused = []
    for tokens, now in zip(prompts, times, strict=True):
        resident = [(block, used) for block, used in resident if now - used <= ttl_s]
        names = {block for block, _ in resident}
        chain = [tokens[: (index + 1) * size].tobytes() for index in range(len(tokens) // size)]
        found = next((index for index, block in enumerate(chain) if block not in names), len(chain))
        reused.append(min(found, (len(tokens) - 1) // size) * size)
        resident = [(block, used) for block, used in resident if block not in chain]
        resident += [(block, now) for block in reversed(chain)]
        room = max(0, blocks - (len(tokens) % size > 0))  # a running request holds its partial block
        resident = resident[len(resident) - room :] if room < len(resident) else resident
    return reused


@pytest.mark.parametrize(("seed", "size"), in_turn(SEEDS, [1, 16]))
def test_memory_and_time_hold_together(seed: int, size: int):
    both, memory, time = check_limits(seed, size)
    assert both < memory or both < time


def check_limits(seed: int, size: int) -> tuple[int, int, int]:
    """Compare replays with the list; return tokens reused with both limits, with memory's, and with that of time."""
    prompts = random_prompts(seed)
    times = np.cumsum(np.random.default_rng(seed).exponential(1.0, len(prompts))).round(3)
    arrived = np.rint(times * 1e9).astype(np.int64)
    paths = token_paths(prompts)
    requests = ReplayRequests(paths, np.ones(len(prompts), np.int64), [()] * len(prompts), arrived)
    sums = {}
    for blocks in (320 // size, 960 // size, 1 << 20):
        for ttl_s in (3.0, 12.0, None):
            rules = CacheRules(size, size, blocks * size, pooled=True, outputs=False)
            ttl_ns = None if ttl_s is None else round(ttl_s * 1e9)
            result = replay(requests, replace(rules, ttl_ns=ttl_ns))
            expected = limited(prompts, times.tolist(), blocks, size, np.inf if ttl_s is None else ttl_s)
            assert result.reused.tolist() == expected, (blocks, ttl_s)
            assert (result.reused + sum(result.lost.values())).tolist() == paths.prompt_tokens.tolist()
            assert (EXPIRED in result.lost) == (ttl_s is not None)
            sums[blocks, ttl_s] = int(result.reused.sum())
            if ttl_s is not None and blocks == 1 << 20:
                alone = expiring_reuse(paths, arrived, Expiry(ttl_s, unit=size))
                assert result.reused.tolist() == alone.reused.tolist()
                assert not result.lost["kv_evicted"].any()
                assert result.lost[EXPIRED].any()
    least = 320 // size
    assert sums[least, 12.0] <= min(sums[least, None], sums[1 << 20, 12.0])
    return sums[least, 12.0], sums[least, None], sums[1 << 20, 12.0]


def test_expiry_needs_times_in_order():
    requests = ReplayRequests(token_paths(random_prompts(0)), np.ones(60, np.int64), [()] * 60)
    with pytest.raises(ValueError, match=r"rules\.ttl_ns: expected arrivals that never decrease"):
        replay(requests, CacheRules(1, 1, 100, ttl_ns=5))

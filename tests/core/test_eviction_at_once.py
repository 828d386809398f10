"""Evicting bytes at once or step by step takes the same entries, so steps can be jumped."""

import numpy as np
import pytest

from .factories import BLIND_EVICTIONS, finish, make_budget, make_policy, make_request, walk

TOKENS = 96


def full_policy(eviction: str, fixed_blocks: bool, seed: int):
    """Return a policy whose store is full of prompts with common prefixes."""
    rng = np.random.default_rng(seed)
    policy = make_policy(make_budget(tokens=TOKENS), eviction=eviction, block_size=4, fixed_blocks=fixed_blocks)
    earlier = [()]
    for number in range(30):
        base = earlier[rng.integers(len(earlier))][: 4 * rng.integers(6)]
        earlier.append((*base, *rng.integers(0, 9, rng.integers(1, 21)).tolist()))
        allocation = policy.allocate(policy.match(make_request(earlier[-1], id=number), number), number)
        assert allocation is not None
        finish(policy, allocation, number)
    return policy


def stored(policy) -> list[tuple[int, ...]]:
    """Return the paths of all nodes."""
    return sorted(tuple(path) for root in policy.index.all() for path, _ in walk(root))


@pytest.mark.parametrize("fixed_blocks", [False, True])
@pytest.mark.parametrize("eviction", BLIND_EVICTIONS)
def test_the_same_entries_are_evicted_at_once_and_token_by_token(eviction, fixed_blocks):
    for seed in range(3):
        at_once, stepwise = (full_policy(eviction, fixed_blocks, seed) for _ in range(2))
        for tokens in (1, 7, 30, 40):
            assert at_once.store.reserve(tokens, 0)
            assert all(stepwise.store.reserve(1, 0) for _ in range(tokens))
            assert stored(at_once) == stored(stepwise)

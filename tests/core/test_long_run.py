"""A million operations on one store: slow, and the one place where heaps grow stale for real."""

import numpy as np
import pytest

from .factories import assert_drained, assert_within_budget, make_budget, make_policy, make_request

OPERATIONS, AUDIT_EVERY, SEATS = 1_000_000, 5_000, 24


def prompts(rng):
    """Prompts that share heads of very different popularity; a new head now and then."""
    heads = [rng.integers(0, 1 << 20, int(rng.integers(4, 60))).tolist() for _ in range(200)]
    while True:
        rank = int(rng.zipf(1.3)) % len(heads)
        if rng.random() < 0.02:
            heads[rank] = rng.integers(0, 1 << 20, int(rng.integers(4, 60))).tolist()
        head = heads[rank]
        yield head[: int(rng.integers(1, len(head) + 1))] + rng.integers(0, 4, int(rng.integers(1, 12))).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("eviction", "hybrid", "block_size"),
    [("lru", True, 1), ("fifo", False, 4), ("lfu", True, 4)],
    ids=["lru", "fifo", "lfu"],
)
def test_random_operations_keep_the_store_consistent(eviction, hybrid, block_size):
    rng = np.random.default_rng(2026)
    policy = make_policy(
        make_budget(tokens=700, states=60 if hybrid else None, total=1_700),
        hybrid=hybrid,
        block_size=block_size,
        grid=block_size,
        fixed_blocks=not hybrid,
        eviction=eviction,
    )
    running, refused, reused, source = [], 0, 0, prompts(rng)
    for now in range(OPERATIONS // 3):
        dice = rng.random()
        if len(running) < SEATS and dice < 0.35:
            tokens = next(source)
            plan = policy.match(make_request(tokens), now)
            allocation = policy.allocate(plan, now)
            assert sum(plan.losses) + plan.resume == len(tokens)
            refused += allocation is None
            reused += plan.resume
            if allocation is not None:
                running.append([tokens, plan, allocation, plan.resume])
        elif running:
            index = int(rng.integers(len(running)))
            tokens, plan, allocation, computed = running[index]
            if dice > 0.95 or computed == plan.prompt:
                policy.free(allocation, 0)
                running[index] = running[-1]
                running.pop()
            elif dice > 0.9:
                policy.append(allocation, allocation.reserved_to, allocation.reserved_to + 1)
            else:
                running[index][3] = min(plan.prompt, computed + int(rng.integers(1, 40)))
                policy.insert(allocation, running[index][3], now)
                match = policy.match(make_request(tokens), now)
                assert match.matched >= running[index][3] // block_size * block_size
        assert_within_budget(policy.store)
        if now % AUDIT_EVERY == 0:
            policy.check()
    for _, _, allocation, _ in running:
        policy.free(allocation, 0)
    policy.check()
    assert_drained(policy)
    assert min(refused, reused, policy.store.evicted_bytes) > 0, "the run never came under pressure"

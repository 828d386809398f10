"""The order `reuse_value`: rates of reuse against a simulation and a fine grid, evictions against LRU."""

import numpy as np
import pytest

from spanlab.core.eviction.scores import WIDTHS, ReuseClass, ReuseRates, index_of, interval_of
from spanlab.core.store import recount

from .factories import KV, STATE, at, make_budget, make_policy, make_request

STARTS = np.concatenate([[0.0], np.cumsum(WIDTHS)[:-1]])
LEAF = ReuseClass("leaf", 0, inner=False)


def test_interval_holds_its_ages():
    for age in [*range(2_000), 10**6, 10**9]:
        at_age = interval_of(age)
        assert STARTS[at_age] <= age < STARTS[at_age] + WIDTHS[at_age]


@pytest.mark.parametrize("seed", range(4))
def test_index_is_the_best_ratio_over_all_times_to_stop(seed):
    rng = np.random.default_rng(seed)
    rates = 10.0 ** rng.uniform(-4, 0, 12)
    rates = np.concatenate([rates, np.full(len(WIDTHS) - 12, 1e-9)])
    index = index_of(rates)
    for start in (0, 1, 5, 9):
        grid = np.linspace(STARTS[start], STARTS[12], 60_001)
        at_grid = rates[np.searchsorted(STARTS, grid[:-1], side="right") - 1]
        gone = np.concatenate([[0.0], np.cumsum(at_grid * np.diff(grid))])
        survival = np.exp(-gone)
        waited = np.cumsum((survival[1:] + survival[:-1]) / 2 * np.diff(grid))
        assert index[start] == pytest.approx(((1 - survival[1:]) / waited).max(), rel=2e-3)


def test_rates_are_those_of_the_process_although_entries_are_evicted():
    rng, rates, hazard = np.random.default_rng(0), ReuseRates(), 0.01
    for _ in range(4_000):
        reuse, eviction = rng.exponential(1 / hazard), rng.exponential(60)
        age = int(min(reuse, eviction))
        (rates.add_reuse if reuse < eviction else rates.add_time)(LEAF, 0, age)
    assert rates.index(LEAF, 20) == pytest.approx(hazard, rel=0.25)


def test_unknown_classes_use_the_common_rate():
    rates = ReuseRates()
    assert rates.index(LEAF, 10) > rates.index(LEAF, 100) > rates.index(LEAF, 1_000)  # no use is observed yet
    for _ in range(64):
        rates.add_time(LEAF, 0, 300)
        rates.add_reuse(LEAF._replace(uses=1), 0, 10)
    other = LEAF._replace(uses=2)
    assert rates.index(LEAF, 4) < rates.index(other, 4) < rates.index(LEAF._replace(uses=1), 4)
    assert LEAF._replace(uses=7).coarse == LEAF._replace(uses=4).coarse != LEAF._replace(uses=8).coarse


def serve(policy, tokens, now: int, id: int = 0) -> int:
    """Serve one request alone; return its reused tokens."""
    request = make_request(tokens, id=id)
    plan = policy.match(request, now)
    allocation = policy.allocate(plan, now)
    assert allocation is not None
    policy.insert(allocation, len(tokens), now)
    policy.finish(allocation, 0, now)
    policy.free(allocation, now)
    return plan.reused


def test_kv_without_a_state_leaves_first():
    policy = make_policy(make_budget(total=40 * KV + 4 * STATE), hybrid=True, placer=at(10), eviction="reuse_value")
    serve(policy, range(10), 0)  # a state at its end
    serve(policy, range(100, 109), 1)  # none, and used later
    for number in range(2, 9):
        serve(policy, range(100 * number + 100, 100 * number + 109), number)
    assert serve(policy, [*range(10), 5], 9) == 10


def beside_scans(eviction: str) -> int:
    """Return the reused tokens for ten documents with repeated requests, among documents with one request each."""
    policy = make_policy(make_budget(total=300 * KV + 12 * STATE), hybrid=True, placer=at(20), eviction=eviction)
    rng, reused = np.random.default_rng(4), 0
    for now in range(300):
        number = int(rng.integers(10)) if rng.random() < 0.4 else 100 + now
        reused += serve(policy, range(1_000 * number, 1_000 * number + 21), now, now)
    policy.check()
    return reused


def test_learned_value_outlives_single_requests():
    assert beside_scans("reuse_value") > 1.1 * beside_scans("lru") > 0


def test_more_entries_than_are_drawn_keep_the_budget():
    policy = make_policy(make_budget(tokens=1_500), eviction="reuse_value", block_size=4)
    rng = np.random.default_rng(5)
    reused = 0
    for number in range(1_200):
        key = int(rng.zipf(1.3)) % 700
        reused += serve(policy, [key, 1, 2, 3, 9], number, number)
        assert policy.store.kv_cached <= 1_500 * KV
    recount(policy.store, policy.index.all())
    assert reused > 0


def test_equal_runs_evict_equally():
    def run() -> list[int]:
        policy, rng = make_policy(make_budget(tokens=900), eviction="reuse_value"), np.random.default_rng(6)
        return [serve(policy, [int(key) % 500, 1, 2, 9], now) for now, key in enumerate(rng.zipf(1.2, 800))]

    assert run() == run()

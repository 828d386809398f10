"""Many requests in flight, and many threads: every history equals a sequential one, and every lock is given back."""

from __future__ import annotations

import sys
from itertools import count
from threading import Thread

import pytest

from spanlab.core.admission import always
from spanlab.core.placement import balanced, no_states
from spanlab.core.policies.pinning import PinningPolicy
from spanlab.core.prefix_index import SharedIndex
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.shared import SharedPolicy

from .clients import Client, Recorder, repeat
from .factories import assert_drained, assert_within_budget, counters, held, make_budget, make_policy, make_store
from .test_block_policy import make_policy as make_blocks


def make_pinning():
    store = make_store(make_budget(tokens=400), eviction="lease")
    return PinningPolicy(ReuseRules(), store, SharedIndex(store.tree), no_states(), always())


POLICIES = {
    "tree": lambda: make_policy(make_budget(tokens=400)),
    "hybrid": lambda: make_policy(make_budget(total=700), hybrid=True, placer=balanced(2), grid=2),
    "priority": lambda: make_policy(make_budget(tokens=400), eviction="priority", block_size=4, fixed_blocks=True),
    "pins": make_pinning,
    "blocks": lambda: make_blocks(blocks=120),
}


def holds(policy) -> object:
    """All that a policy holds, and its counters."""
    if not hasattr(policy, "index"):
        pool = policy.store.pool
        return pool.num_free, pool.num_published, pool.num_evicted, [block.digest for block in pool.waiting()]
    return held(policy), counters(policy.store)


def assert_nothing_held(policy) -> None:
    """Every request is gone, and every pin has ended."""
    policy.check()
    if hasattr(policy, "index"):
        policy.start_step(1 << 60)
        assert_drained(policy)
    else:
        assert policy.store.pool.num_free == policy.store.pool.num_blocks


@pytest.fixture
def impatient():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(("threads", "operations"), [(8, 150), pytest.param(100, 10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", POLICIES)
def test_threads_leave_a_sequential_history(impatient, name, threads, operations):
    recorder = Recorder(POLICIES[name]())
    shared, times, ids, failures = SharedPolicy(recorder), count(), count(), []

    def work(seed: int) -> None:
        client = Client(shared, seed, 4, times, ids)
        try:
            for _ in range(operations):
                client.act()
            client.end()
        except BaseException as error:
            failures.append(error)
            raise

    workers = [Thread(target=work, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    assert len(recorder.history) > threads * operations / 2
    fresh = POLICIES[name]()
    repeat(recorder.history, fresh)
    assert holds(recorder.policy) == holds(fresh)
    recorder.policy.check()
    assert_nothing_held(recorder.policy)


@pytest.mark.parametrize(
    "in_flight", [10, pytest.param(32, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", POLICIES)
def test_requests_in_flight_keep_what_they_read(name, in_flight):
    policy = POLICIES[name]()
    client = Client(SharedPolicy(policy), in_flight, in_flight, count(), count())
    for _ in range(40 * in_flight):
        client.act()
        policy.check()
        if name != "blocks":
            assert_within_budget(policy.store)
            for one in client.running:
                _stored(one.allocation)
    assert client.refused or in_flight == 10
    client.end()
    assert_nothing_held(policy)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_million_operations_stay_within_budget(name):
    """A fifth of a million for each policy; budgets after each operation, a recount of everything now and then."""
    policy = POLICIES[name]()
    client = Client(SharedPolicy(policy), 7, 32, count(), count())
    for at in range(200_000):
        client.act()
        if name != "blocks":
            assert_within_budget(policy.store)
        if at % 500 == 0:
            policy.check()
    client.end()
    assert_nothing_held(policy)


def _stored(allocation) -> None:
    """What a request reads is locked and in the tree, its states at their depths."""
    for node, stored in zip(allocation.nodes, allocation.stored, strict=True):
        assert node.depth == stored
        while node.parent is not None:
            assert node.locks > 0
            assert node.parent.children[node.key] is node
            node = node.parent
    for state in allocation.states:
        assert state.locks
        assert state.node is not None

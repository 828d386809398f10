"""Many requests in flight, and many threads: every history equals a sequential one, and every lock is given back."""

import os
import sys
from itertools import count
from threading import Thread

import numpy as np
import pytest

from spanlab.core.admission import BatchRules, always
from spanlab.core.placement import balanced, every_n
from spanlab.core.policies.tree_variants import PinningPolicy
from spanlab.core.protocol import SharedPolicy
from spanlab.core.request import Request, Span
from spanlab.core.scheduler import Scheduler
from spanlab.core.step import finished_after

from ..support.policies import make_tree_policy
from .clients import DOCUMENTS, Client, Recorder, repeat
from .factories import KV, assert_drained, assert_within_budget, counters, held, make_budget, make_policy
from .test_block_policy import make_policy as make_blocks

POLICIES = {
    "tree": lambda: make_policy(make_budget(tokens=400)),
    "hybrid": lambda: make_policy(make_budget(total=700), hybrid=True, placer=balanced(2), grid=2),
    "priority": lambda: make_policy(make_budget(tokens=400), eviction="priority", block_size=4, fixed_blocks=True),
    "pins": lambda: make_tree_policy(
        None, always(), kind=PinningPolicy, budget=make_budget(tokens=400), kv_bytes=KV, eviction="lease"
    ),
    "blocks": lambda: make_blocks(blocks=120),
}
#: Policies whose requests resume from states.
HYBRIDS = {
    "tree": POLICIES["hybrid"],
    "values": lambda: make_policy(
        make_budget(total=900), hybrid=True, placer=every_n(4), grid=4, eviction="reuse_value"
    ),
    "blocks": lambda: make_blocks(blocks=400, states="align"),
    "junctions": lambda: make_blocks(blocks=400, states="align", retention=8),
}


def holds(policy) -> object:
    """All that a policy holds, and its counters."""
    if not hasattr(policy, "index"):
        pool = policy.store.pool
        return pool.num_free, pool.num_published, pool.num_evicted, [block.digest for block in pool.waiting()]
    return held(policy), counters(policy.store)


def assert_nothing_held(policy) -> None:
    """All requests have ended, and all pins have expired."""
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


#: Of each of 100 threads. An operation takes some 0.4 ms of processor time: with so many threads nearly each hands the
#: interpreter on, and the history is repeated. 10,000 of them take eight minutes for each policy on a calm core.
OPERATIONS = int(os.environ.get("SPANLAB_THREAD_OPERATIONS", "1000"))


@pytest.mark.parametrize(("threads", "operations"), [(8, 150), pytest.param(100, OPERATIONS, marks=pytest.mark.slow)])
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
            for request in client.running:
                _stored(request.allocation)
    assert client.refused or in_flight == 10
    client.end()
    assert_nothing_held(policy)


@pytest.mark.parametrize(
    "in_flight", [10, pytest.param(32, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", HYBRIDS)
def test_states_of_a_step_are_found_from_the_next_step_on(name, in_flight):
    """A request resumes only from entries stored before its admitting step, even if that step computes more of them."""
    policy = HYBRIDS[name]()
    rng, ids, resumed = np.random.default_rng(in_flight), count(), list[int]()
    scheduler = Scheduler(policy, BatchRules(max_num_batched_tokens=16 * in_flight, max_num_seqs=in_flight))
    for now in range(40):
        for _ in range(int(rng.integers(in_flight))):  # most of them beside an equal prompt
            document = DOCUMENTS[int(rng.integers(4))][: int(rng.integers(1, 5)) * 8]
            scheduler.add(Request(next(ids), 0, (Span(document),), output_len=int(rng.integers(1, 4))))
        before = {
            sequence.request.id: policy.match(sequence.request, now, sequence.generated).resume
            for sequence in scheduler.waiting
        }
        step = scheduler.schedule(now)
        for sequence in scheduler.running:
            if sequence.request.id in before:
                assert sequence.allocation.plan.resume <= before[sequence.request.id]
                resumed.append(sequence.allocation.plan.resume)
        if step is not None:
            scheduler.complete(step, now, finished_after(step))
        policy.check()
    assert 0 < sum(resume > 0 for resume in resumed) < len(resumed)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_million_operations_stay_within_budget(name):
    """A fifth of a million for each policy; budgets after each operation, a recount of everything now and then."""
    policy = POLICIES[name]()
    client = Client(SharedPolicy(policy), 7, 32, count(), count())
    for number in range(200_000):
        client.act()
        if name != "blocks":
            assert_within_budget(policy.store)
        if number % 500 == 0:
            policy.check()
    client.end()
    assert_nothing_held(policy)


def _stored(allocation) -> None:
    """Entries that a request reads are locked and in the tree, states at their depths."""
    for node, stored in zip(allocation.nodes, allocation.stored, strict=True):
        assert node.depth == stored
        while node.parent is not None:
            assert node.locks > 0
            assert node.parent.children[node.key] is node
            node = node.parent
    for state in allocation.states:
        assert state.locks
        assert state.node is not None

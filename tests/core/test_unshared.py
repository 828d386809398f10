"""The pool that counts blocks decides as the pool of hashed blocks on prompts without common tokens."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.admission import BatchRules
from spanlab.core.plan import DecodeBatch
from spanlab.core.policies.block_pool import BlockPool, BlockRules, BlockStore
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.policies.chunks import CountedBlocks, UnsharedPolicy
from spanlab.core.request import Request, Span
from spanlab.core.scheduler import Scheduler
from spanlab.core.step import finished_after

SIZE, BLOCKS = 4, 12
LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(0, 6)), min_size=1, max_size=12)


def requests(lengths):
    """Return prompts without common tokens, each with the step before which it arrives."""
    starts = np.cumsum([0, *(prompt for prompt, _, _ in lengths)])
    return [
        (Request(id, 0, (Span(np.arange(start, start + prompt, dtype=np.int32)),), output), waits)
        for id, (start, (prompt, output, waits)) in enumerate(zip(starts, lengths, strict=False))
    ]


def schedule(policy, lengths):
    """Return the key of every step."""
    scheduler, steps = Scheduler(policy, BatchRules(max_num_batched_tokens=8, max_num_seqs=5)), []
    due = requests(lengths)
    for now in range(2000):
        for request, waits in list(due):
            if waits <= now:
                scheduler.add(request)
                due.remove((request, waits))
        step = scheduler.schedule(now)
        if step is None:
            if not due:
                return steps
            continue
        steps.append(step.key())
        scheduler.complete(step, now, finished_after(step))
    raise AssertionError("the requests do not end")


@settings(max_examples=80, deadline=None)
@given(LENGTHS)
def test_steps_equal_those_of_the_hashed_pool(lengths):
    hashed = BlockPolicy(BlockRules(SIZE), BlockStore(BlockPool(BLOCKS), 1, 1))
    assert schedule(UnsharedPolicy(SIZE, CountedBlocks(BLOCKS, 1)), lengths) == schedule(hashed, lengths)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=6), st.integers(0, 20))
def test_spare_steps_are_all_that_there_is_room_for(tables, free):
    """Compare with allocating one token at a time until a block is missing."""
    blocks = [-(-tokens // SIZE) for tokens, _ in tables]
    policy = UnsharedPolicy(SIZE, CountedBlocks(sum(blocks) + free, 1))
    allocations = []
    for id, (tokens, _) in enumerate(tables):
        request = Request(id, 0, (Span(np.zeros(tokens, np.int32)),))
        allocations.append(policy.allocate(policy.match(request, 0), 0))
        assert policy.append(allocations[-1], 0, tokens)
    steps, stops = 0, [tokens for tokens, _ in tables]
    batch = DecodeBatch()
    batch.sequences, batch.members = allocations, {number: (each, 0) for number, each in enumerate(allocations)}
    spare = policy.spare_steps(batch)
    pairs = list(zip(allocations, stops, strict=True))
    while all(policy.append(allocation, stop + steps, stop + steps + 1) for allocation, stop in pairs):
        steps += 1
    assert steps == spare


def test_a_preempted_request_reuses_its_remaining_blocks():
    policy = UnsharedPolicy(SIZE, store := CountedBlocks(4, 1))
    request = Request(0, 0, (Span(np.zeros(12, np.int32)),))
    allocation = policy.allocate(policy.match(request, 0), 0)
    policy.append(allocation, 0, 12)
    policy.free(allocation, 0)
    store.take(2)  # the blank block, and the last one of the request
    assert policy.match(request, 0).resume == 8
    assert store.kv_cached == 2
    assert store.evicted_bytes == 1

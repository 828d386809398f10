"""A refused prompt is matched again only when it may fit."""

from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.admission import BatchRules
from spanlab.core.policies.block_pool import BlockPool, BlockRules, BlockStore, single_blocks
from spanlab.core.policies.blocks import BlockPolicy, Refusal
from spanlab.core.policies.chunks import CountedBlocks, UnsharedPolicy
from spanlab.core.scheduler import Scheduler

from .steps import serve_waves
from .test_block_policy import request

SIZE, BLOCKS = 2, 10
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
REQUESTS = st.lists(st.tuples(TOKENS, st.lists(st.integers(0, 1), min_size=1, max_size=8)), min_size=2, max_size=8)


class Watched:
    """A policy that records its plans; with `forgetful` it matches a refused prompt in every step."""

    def __init__(self, blocks, forgetful=False, drops_last=False):
        self.policy = BlockPolicy(BlockRules(SIZE, drafter=drops_last), BlockStore(BlockPool(blocks), 1, 1))
        self.plans, self.forgetful = [], forgetful

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def match(self, request, now, generated=0):
        if self.forgetful:
            self.policy._refusal = None
        self.plans.append(self.policy.match(request, now, generated))
        return self.plans[-1]


def steps_of(policy, drawn, budget):
    """Return the keys of all steps, and the finish time and losses of each request."""
    requests = [request(id, tokens, len(output), output_ids=output) for id, (tokens, output) in enumerate(drawn)]
    steps = []
    rules = BatchRules(max_num_batched_tokens=budget, max_num_seqs=4)
    sequences = serve_waves(policy, [requests], rules, lambda step: steps.append(step.key()))
    return steps, {id: (sequence.finished_at, sequence.first_plan.losses) for id, sequence in sequences.items()}


@settings(max_examples=120, deadline=None)
@given(REQUESTS, st.sampled_from([3, 8, 64]), st.booleans())
def test_steps_are_those_of_looking_each_time(drawn, budget, drops_last):
    remembered = Watched(BLOCKS, drops_last=drops_last)
    assert steps_of(remembered, drawn, budget) == steps_of(Watched(BLOCKS, True, drops_last), drawn, budget)


def test_a_refused_prompt_is_looked_up_once():
    policy = Watched(11)
    scheduler = Scheduler(policy, BatchRules())
    for id in range(2):
        scheduler.add(request(id, range(100 * id, 100 * id + 12), 11))
    for now in range(10):
        scheduler.complete(scheduler.schedule(now), now, [])
    assert (len(scheduler.running), len(scheduler.waiting)) == (1, 1)
    assert (len(policy.plans), len(set(policy.plans))) == (3, 2)


def test_a_request_of_higher_priority_is_tried_at_once():
    policy = BlockPolicy(BlockRules(SIZE), BlockStore(BlockPool(8), 1, 1))
    scheduler = Scheduler(policy, BatchRules())
    scheduler.add(request(0, range(8), 6))
    scheduler.complete(scheduler.schedule(0), 0, [])
    scheduler.add(replace(request(1, range(100, 120)), priority=1))
    scheduler.complete(scheduler.schedule(1), 1, [])
    scheduler.add(request(2, range(200, 202)))
    assert [chunk.sequence.request.id for chunk in scheduler.schedule(2).chunks] == [2]


def test_a_prompt_without_chunks_is_tried_in_every_step():
    """Decoding may evict what it would reuse, and a prompt that is longer than a step starts at once."""
    rules = BatchRules(max_num_batched_tokens=20, max_num_seqs=4, enable_chunked_prefill=False)
    scheduler = Scheduler(UnsharedPolicy(SIZE, CountedBlocks(100, 1)), rules)
    scheduler.add(request(0, range(2), 30))
    scheduler.complete(scheduler.schedule(0), 0, [])
    scheduler.add(request(1, range(100, 120)))
    step = scheduler.schedule(1)
    assert (len(step.decodes), step.chunks, step.max_repeats) == (1, [], 1)


EVENTS = {
    "a matched block is used by another": lambda pool, blocks: pool.use(single_blocks(blocks[:1])),
    "a matched block is evicted, and its memory is free": lambda pool, blocks: pool.free(pool.take_single(2)),
    "the next block is published": lambda pool, blocks: pool.publish_single(0, blocks[1], 9),
    "there is enough memory": lambda pool, blocks: pool.free(blocks[1:2]),
}


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS.keys())
def test_a_refusal_ends_where_the_answer_may_change(event):
    pool = BlockPool(4)
    blocks = pool.take_single(3)
    pool.publish_single(0, blocks[0], 7)
    pool.free(blocks[:1])
    policy = BlockPolicy(BlockRules(SIZE), BlockStore(pool, 1, 1))
    plan = policy.match(request(0, range(6)), 0)
    refusal = Refusal(plan, 0, needed=3, unreferenced=1, digests=array("Q", [7, 9]), revived=0, evicted=0)
    assert refusal.still_applies(pool)
    event(pool, blocks)
    assert not refusal.still_applies(pool)

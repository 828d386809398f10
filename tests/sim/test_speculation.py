"""Speculative decoding, simulated: worked out by hand, and against runs without it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanlab.core.admission import BatchRules, Speculation
from spanlab.core.ledger import NoLedger
from spanlab.core.policies.block_pool import BlockPool, BlockRules, BlockStore
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.policies.chunks import CountedBlocks, UnsharedPolicy
from spanlab.core.request import Request, Span
from spanlab.core.step import ScheduledSequence, ScheduledStep, features
from spanlab_sim.run import simulate

from ..support.products import in_turn
from .test_by_hand import MS, TIMING, make_policy, make_request, serve, times_ms

ALL = Speculation(draft_tokens=2, acceptance=1.0, draft_cost=0.25)


def blocks(count=200, **rules):
    return BlockPolicy(BlockRules(4, **rules), BlockStore(BlockPool(count), 1, 1), ledger=NoLedger())


POLICIES = {
    "tree": lambda: make_policy(kv_bytes=400),
    "blocks": lambda: blocks(100),
    "blocks ahead": lambda: blocks(100, ahead=True),
    "unshared": lambda: UnsharedPolicy(4, CountedBlocks(100, 1)),
}


def test_one_request_whose_drafts_all_hold():
    """Prefill 15 ms, then steps of 3 tokens: 10 + 2 (decode) + 2 x 1 (rows) + 2 x 0.25 x 12 ms (drafting) = 20 ms."""
    records, log, row = serve([make_request(0, 7, 8, range(5))], BatchRules(speculation=ALL))
    assert times_ms(records[0]) == [7, 7, 7 + 15, 7 + 15 + 3 * 20]  # 1 + 3 + 3 + 1 tokens, the last step cut short
    assert records[0].output_tokens == 8
    assert (row.steps, row.busy_s) == (4, 75 * MS * 1e-9)
    assert [decodes for _, _, decodes, *_ in log] == [(), (0,), (0,), (0,)]


def test_drafts_that_never_hold_cost_their_time():
    """Every step yields one token: 3 steps of 20 ms behind the prefill."""
    never = replace(ALL, acceptance=0.0)
    records, _, row = serve([make_request(0, 0, 4, range(5))], BatchRules(speculation=never))
    assert (times_ms(records[0])[-1], row.steps) == (15 + 3 * 20, 4)


@pytest.mark.parametrize(("output", "steps"), [(8, 4), (7, 4)])
def test_a_request_planned_ahead_takes_part_once_more_where_drafts_end_it(output, steps):
    """1 + 3 + 3 + 1 tokens: the last is certain. 1 + 3 + 3: two of the last are drafts; a step follows for nothing."""
    rules = BatchRules(speculation=ALL, async_scheduling=True)
    records, log, row = serve([make_request(0, 7, output, range(5))], rules)
    assert times_ms(records[0])[-1] == 7 + 15 + (3 * 20 if output == 8 else 2 * 20)
    assert (records[0].output_tokens, row.steps) == (output, steps)
    assert [decodes for _, _, decodes, *_ in log] == [(), (0,), (0,), (0,)]


def test_rows_that_verify_read_the_context_once_and_each_need_logits():
    requests = [make_request(0, 0, 9, range(5)), make_request(1, 0, 9, range(3))]
    sequences = [ScheduledSequence(request) for request in requests]
    for sequence in sequences:
        sequence.generated = 2
    plain = features(ScheduledStep([], sequences, []), 0)
    counts = features(ScheduledStep([], sequences, [], drafts=[2, 1]), 0)
    assert counts.decode_context == plain.decode_context == 7 + 5
    changed = {"prefill_tokens": 3, "prefill_pairs": (7 + 1) + (7 + 2) + (5 + 1), "num_first_tokens": 3}
    assert counts == plain._replace(**changed)


@pytest.mark.parametrize(
    ("name", "ahead"), [*((name, name == "blocks ahead") for name in POLICIES), ("tree", True), ("unshared", True)]
)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=8),
    drafts=st.integers(1, 7),
    acceptance=st.sampled_from((0.0, 0.3, 0.8, 1.0)),
    tokens=st.integers(8, 40),
)
def test_every_request_gets_its_output_and_nothing_stays_held(name, ahead, shapes, drafts, acceptance, tokens):
    requests = [
        make_request(at, arrived, output, range(prompt)) for at, (arrived, prompt, output) in enumerate(sorted(shapes))
    ]
    rules = BatchRules(tokens, 8, async_scheduling=ahead, speculation=Speculation(drafts, acceptance))
    policy = POLICIES[name]()
    records, log, _ = serve(requests, rules, policy)
    assert [records[at].output_tokens for at in range(len(requests))] == [one.output_len for one in requests]
    decodes, wanted = sum(len(one[2]) for one in log), sum(one.output_len - 1 for one in requests)
    preemptions = sum(one.preemptions for one in records.values())
    assert wanted <= decodes * (1 + drafts) + preemptions  # who computes its tokens again gets one at the end
    if acceptance == 0.0 and not preemptions:
        assert decodes == wanted
    check_free(name, policy)


@pytest.mark.parametrize(("ahead", "method"), in_turn([False, True], ["ngram", "eagle"]))
@given(
    shapes=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=6),
    drafts=st.integers(1, 7),
    tokens=st.integers(8, 40),
)
def test_room_for_one_request_is_enough(method, ahead, shapes, drafts, tokens):
    """Who has the memory to itself runs to its end, with fewer drafts where those have no room."""
    requests = [
        make_request(at, arrived, output, range(prompt)) for at, (arrived, prompt, output) in enumerate(sorted(shapes))
    ]
    room = max(-(-(one.num_tokens + one.output_len - 1) // 4) for one in requests)
    policy = blocks(room, drafter=method == "eagle", ahead=ahead)
    rules = BatchRules(tokens, 8, async_scheduling=ahead, speculation=Speculation(drafts, method=method))
    records, _, _ = serve(requests, rules, policy)
    assert [records[at].output_tokens for at in range(len(requests))] == [one.output_len for one in requests]
    policy.check()
    assert policy.store.pool.num_free == room


def check_free(name, policy):
    """All memory can be used again."""
    if name == "tree":
        policy.check()
        assert policy.store.kv_locked == 0
    elif name.startswith("blocks"):
        policy.check()
        assert policy.store.pool.num_free == 100
    else:
        assert policy.store.num_free == 100


def test_drafts_are_not_findable_before_they_hold():
    """A block is published when its last token is known: with none accepted, at that token's own step."""
    policy, output = blocks(), np.arange(100, 120, dtype=np.int32)
    generating = replace(make_request(0, 0, 20, range(4)), output=output)
    later = Request(1, 0, (*generating.spans, Span(output)))
    known, found = [], []

    def look(step, now, result):
        for sequence in step.decodes:
            known.append(sequence.prompt + sequence.generated)
            found.append(policy.match(later, now).matched)

    rules = BatchRules(speculation=Speculation(3, acceptance=0.0))
    simulate([generating], policy, rules, TIMING, lambda record: None, on_step=look)
    assert found == [tokens // 4 * 4 for tokens in known]
    assert max(found) > 4

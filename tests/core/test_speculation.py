"""Drafts: accepted tokens, their part of a step, and refused settings."""

import math
from dataclasses import replace

import numpy as np
import pytest

from spanlab.core.admission import BatchRules, Speculation
from spanlab.core.ahead import make_scheduler
from spanlab.core.policies.block_pool import NULL_BLOCK, BlockPool, BlockRules, BlockStore
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.policies.chunks import CountedBlocks, UnsharedPolicy
from spanlab.core.releases import RELEASES
from spanlab.core.request import Request, Span
from spanlab.core.rules import ReuseRules
from spanlab.core.scheduler import SpeculativeScheduler
from spanlab.core.step import features

DRAWS = 20_000
MTP = {"method": "eagle", "draft_layers": 2, "modules": 2, "draft_tokens": 2}


def make(drafts, blocks=1000, tokens=64, method="ngram"):
    rules = BatchRules(tokens, max_num_seqs=8, speculation=Speculation(drafts, method=method))
    return make_scheduler(UnsharedPolicy(4, CountedBlocks(blocks, 1)), rules)


def request(id, prompt=4, output=20):
    return Request(id, 0, (Span(np.zeros(prompt, np.int32)),), output)


def step_of(scheduler, now, *accepted):
    step = scheduler.schedule(now)
    scheduler.complete(step, now + 1, (), accepted)
    return step


@pytest.mark.parametrize(("acceptance", "drafts"), [(0.5, 1), (0.7, 3), (0.9, 8)])
def test_as_many_hold_as_published(acceptance, drafts):
    """Leviathan et al., arXiv 2211.17192, equation 1: tokens per step are (1 - a^(k + 1)) / (1 - a) in the mean."""
    speculation = Speculation(drafts, acceptance)
    accepted_drafts = np.array([speculation.accepted(number % 100, number // 100, drafts) for number in range(DRAWS)])
    assert (accepted_drafts.min(), accepted_drafts.max()) == (0, drafts)
    expected = (1 - acceptance ** (drafts + 1)) / (1 - acceptance)
    assert abs(1 + accepted_drafts.mean() - expected) < 4 * accepted_drafts.std() / math.sqrt(DRAWS)
    for longest in range(drafts):  # each draft is accepted with the same probability after accepted ones
        behind = accepted_drafts[accepted_drafts >= longest] > longest
        assert abs(behind.mean() - acceptance) < 4 * math.sqrt(acceptance * (1 - acceptance) / len(behind))


def test_none_and_all_hold_at_the_ends():
    assert {Speculation(3, 0.0).accepted(number, 1, 3) for number in range(99)} == {0}
    assert {Speculation(3, 1.0).accepted(number, 1, 3) for number in range(99)} == {3}


def test_a_step_verifies_drafts_within_its_budget():
    scheduler = make(3, tokens=10)
    assert type(scheduler) is SpeculativeScheduler
    for number in range(3):
        scheduler.add(request(number, prompt=3))
    assert [chunk.tokens for chunk in step_of(scheduler, 0).chunks] == [3, 3, 3]
    step = step_of(scheduler, 1, 3, 0, 1)
    assert step.drafts == [3, 3, 1]  # 4 + 4 + 2 rows
    assert step.key() != replace(step, drafts=[3, 3, 0]).key()
    assert step.max_repeats == 1
    assert [sequence.generated for sequence in step.decodes] == [1 + 1 + 3, 1 + 1, 1 + 1 + 1]


def test_drafts_take_memory_and_preempt_the_last():
    scheduler = make(4, blocks=4)  # of 4 tokens each
    for number in range(2):
        scheduler.add(request(number, prompt=4))
    step_of(scheduler, 0)
    step = step_of(scheduler, 1, 0)  # tokens 4 to 8 of the first need two blocks: the second gives way
    assert [sequence.request.id for sequence in step.decodes] == [0]
    assert [sequence.request.id for sequence in scheduler.waiting] == [1]


def test_who_is_alone_drafts_as_many_as_fit():
    scheduler = make(6, blocks=2)
    scheduler.add(request(0, prompt=4, output=4))
    step_of(scheduler, 0)
    assert step_of(scheduler, 1, 1).drafts == [3]  # tokens 4 to 7
    assert step_of(scheduler, 2, 1).drafts == [1]


def test_who_gets_alone_drafts_as_many_as_fit():
    scheduler = make(8, blocks=3)
    for number in range(2):
        scheduler.add(request(number, prompt=4))
    step_of(scheduler, 0)
    step = step_of(scheduler, 1, 0)  # tokens 4 to 12 need three blocks, and two are there once the other has left
    assert ([sequence.request.id for sequence in step.decodes], step.drafts) == ([0], [7])


@pytest.mark.parametrize(("method", "held"), [("ngram", [1, 2, 3]), ("eagle", [2, 3, 4])])
def test_a_drafter_with_kv_takes_memory_for_its_next_drafts(method, held):
    """Blocks of 4: a prompt in chunks of 4 and 2, then tokens 6 to 9, all of which hold."""
    scheduler = make(3, tokens=4, method=method)
    scheduler.add(request(0, prompt=6))
    for now, blocks in enumerate(held):
        step_of(scheduler, now, 3)
        (sequence,) = scheduler.running
        assert sequence.allocation.num_blocks == blocks


@pytest.mark.parametrize(("drops_last", "reused"), [(False, [8, 12, 4, 0]), (True, [4, 8, 0, 0])])
def test_the_last_block_of_a_match_is_computed_again(drops_last, reused):
    policy = BlockPolicy(BlockRules(4, drafter=drops_last), BlockStore(BlockPool(20), 1, 1))
    stored = Request(0, 0, (Span(np.arange(12, dtype=np.int32)),))
    allocation = policy.allocate(policy.match(stored, 0), 0)
    policy.append(allocation, 0, 12)
    policy.insert(allocation, 12, 0)
    policy.free(allocation, 0)
    for length, expected in zip((12, 13, 5, 3), reused, strict=True):
        plan = policy.match(Request(1, 0, (Span(np.arange(length, dtype=np.int32)),)), 0)
        assert plan.resume == expected
        assert plan.resume + sum(plan.losses) == length
        assert plan.losses.kv_evicted == 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"draft_tokens": -1}, "batch.speculation.draft_tokens=-1: expected zero or more"),
        ({"acceptance": 1.5}, "batch.speculation.acceptance=1.5: expected a share from 0 to 1"),
        ({"draft_cost": -0.1}, "batch.speculation.draft_cost=-0.1: expected zero or more"),
        ({"method": "mtp"}, "batch.speculation.method=mtp: expected one of ngram, eagle"),
        (
            {"method": "eagle", "draft_tokens": 2},
            "draft_layers=0 with batch.speculation.method=eagle: expected 1 or more",
        ),
        ({"draft_layers": 1, "draft_tokens": 2}, "draft_layers=1 with batch.speculation.method=ngram: expected 0"),
        ({"modules": 2, "draft_tokens": 2}, "batch.speculation.modules=2: expected 1"),
        (MTP | {"modules": 3}, "batch.speculation.modules=3: expected 1 to batch.speculation.draft_layers=2"),
        (MTP | {"modules": 0}, "batch.speculation.modules=0: expected 1 to batch.speculation.draft_layers=2"),
        (MTP | {"draft_tokens": 3}, "draft_tokens=3: expected up to, or a multiple of, batch.speculation.modules=2"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        BatchRules(speculation=Speculation(**settings)).check("batch")


@pytest.mark.parametrize(
    ("limit", "key"),
    [
        ({"max_num_batched_tokens": 3, "max_num_seqs": 1}, "batch.max_num_batched_tokens=3"),
        ({"long_prefill_token_threshold": 3}, "batch.long_prefill_token_threshold=3"),
    ],
)
def test_chunks_smaller_than_modules_read_ahead_are_refused(limit, key):
    rules = BatchRules(**limit, speculation=Speculation(**(MTP | {"draft_tokens": 4})))
    with pytest.raises(ValueError, match=f"{key}: expected at least 4, which the modules of the drafter read ahead"):
        rules.check("batch")


@pytest.mark.parametrize(
    ("modules", "drafts", "reach"), [(1, 3, 1), (3, 1, 1), (3, 3, 3), (3, 2, 2), (2, 4, 4), (2, 0, 0)]
)
def test_several_modules_read_as_many_tokens_ahead_as_they_draft(modules, drafts, reach):
    assert Speculation(drafts, method="eagle", draft_layers=3, modules=modules).reach == reach


def modules_scheduler(release, tokens, drafts=3):
    rules = BlockRules(4, drafts=drafts, drafter=drafts, release=RELEASES[release])
    speculation = Speculation(drafts, method="eagle", draft_layers=3, modules=3)
    return SpeculativeScheduler(
        BlockPolicy(rules, BlockStore(BlockPool(200), 1, 1)), BatchRules(tokens, 8, speculation=speculation)
    )


def served(scheduler, now):
    """The tokens of each chunk of the next step, of which no decode accepts a draft."""
    step = scheduler.schedule(now)
    scheduler.complete(step, now + 1, (), [0] * len(step.decodes))
    return {chunk.sequence.request.id: chunk.tokens for chunk in step.chunks}


@pytest.mark.parametrize(
    ("prompt", "chunks"), [(8, [8]), (9, [6, 3]), (10, [7, 3]), (11, [8, 3]), (18, [8, 7, 3]), (19, [8, 8, 3])]
)
def test_no_chunk_ends_among_the_tokens_that_modules_read_ahead(prompt, chunks):
    scheduler = modules_scheduler("vllm_0_33", tokens=8)
    scheduler.add(request(0, prompt=prompt))
    assert [served(scheduler, now) for now in range(len(chunks) + 1)] == [*({0: chunk} for chunk in chunks), {}]


@pytest.mark.parametrize(("release", "admitted"), [("vllm_0_32", {}), ("vllm_0_33", {2: 2})])
def test_who_waits_for_a_larger_chunk_lets_others_pass_since_0_33(release, admitted):
    scheduler = modules_scheduler(release, tokens=6)
    scheduler.add(request(0, prompt=6))
    assert served(scheduler, 0) == {0: 6}
    scheduler.add(request(1, prompt=3))
    scheduler.add(request(2, prompt=2))
    # Behind a decode of 4 rows, 2 tokens of the next prompt would leave one, and 3 are read ahead: it waits.
    assert served(scheduler, 1) == admitted


@pytest.mark.parametrize(
    ("release", "ahead", "resumes"),  # 0.32: a block less; 0.33: the key of a block has the 3 tokens behind it
    [("vllm_0_32", 3, 4), ("vllm_0_33", 3, 8), ("vllm_0_33", 2, 4)],
)
def test_a_match_of_several_modules_ends_before_the_tokens_that_they_read(release, ahead, resumes):
    scheduler = modules_scheduler(release, tokens=64)
    scheduler.add(request(0, prompt=20, output=1))
    step = scheduler.schedule(0)
    scheduler.complete(step, 1, [step.chunks[0].sequence])
    same = Span(np.zeros(8 + ahead, np.int32))
    later = Request(1, 0, (same, Span(np.ones(9, np.int32))), 1)
    assert scheduler.policy.match(later, 1).resume == resumes


def hybrid_policy(drafts, blocks=20, release="vllm_0_33", **rules):
    rules = BlockRules(4, "align", 1, None, drafts=drafts, release=RELEASES[release], **rules)
    return BlockPolicy(rules, BlockStore(BlockPool(blocks), 1, 1))


def test_each_draft_of_a_hybrid_holds_a_state_which_moves_on():
    """One attention block per 4 tokens, one state at the end of the tokens, and one per draft behind it."""
    policy = hybrid_policy(drafts=3)
    free = policy.store.num_free
    policy.start_step(0)
    allocation = policy.allocate(policy.match(request(0, prompt=9), 0), 0)
    held = []
    for start, stop, drafts in [(0, 8, 0), (8, 9, 0), (9, 10, 3), (13, 14, 3), (17, 18, 3)]:
        policy.start_step(0)
        assert policy.append(allocation, start, stop, drafts)
        held.append(free - policy.store.num_free)
        state = [index for index, block in enumerate(allocation.tables[0].blocks) if block is not NULL_BLOCK]
        assert state[-1] - state[-4] == 3, "the states of the drafts stand behind that of the tokens"
    # Attention: 2, 3, 4, 5 and 6 blocks; states: those of this step, and of the one before.
    assert held == [2 + 4, 3 + 5, 4 + 5, 5 + 5, 6 + 5]
    policy.free(allocation, 0)
    assert policy.store.num_free == free


@pytest.mark.parametrize(("release", "prompt", "resumes"), [("vllm_0_32", 9, 4), ("vllm_0_33", 9, 8)])
def test_drafter_of_a_hybrid_loses_a_block_of_each_hit_until_lookahead(release, prompt, resumes):
    policy = hybrid_policy(drafts=1, release=release, drafter=True)
    scheduler = SpeculativeScheduler(policy, BatchRules(64, max_num_seqs=8, speculation=Speculation(1, method="eagle")))
    for number in (0, 1):
        scheduler.add(request(number, prompt=prompt, output=1))
        for now in range(4):
            step = scheduler.schedule(now)
            if step is not None:
                plans = {chunk.sequence.request.id: chunk.sequence.first_plan.resume for chunk in step.chunks}
                ended = [chunk.sequence for chunk in step.chunks if chunk.last]
                scheduler.complete(step, now, ended, [0] * len(step.decodes))
    assert plans == {1: resumes}


def test_states_inside_a_chunk_beside_a_dropping_drafter_are_refused():
    with pytest.raises(ValueError, match="inner_states=true with a drafter's KV: expected a release with lookahead"):
        hybrid_policy(drafts=1, release="vllm_0_32", drafter=True, inner_states=True)


def test_each_draft_of_a_hybrid_writes_a_state():
    scheduler = make(drafts=3)
    scheduler.add(request(0))
    step_of(scheduler, 0)
    step = scheduler.schedule(1)
    assert step.drafts == [3]
    hybrid = features(step, 1000, ReuseRules(needs_states=True))
    assert (hybrid.added_bytes, features(step, 1000).added_bytes) == (3000, 0)

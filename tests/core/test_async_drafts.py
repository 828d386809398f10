"""Planning ahead with drafts: memory for what may be accepted, ends that are not known, and what is stored."""

from dataclasses import replace

import numpy as np
import pytest

from spanlab.core.admission import BatchRules, Speculation
from spanlab.core.ahead import AsyncSpeculativeScheduler, make_scheduler
from spanlab.core.ledger import NoLedger
from spanlab.core.policies.block_pool import BlockPool, BlockRules, BlockStore
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.policies.chunks import CountedBlocks, UnsharedPolicy
from spanlab.core.releases import RELEASES
from spanlab.core.request import Request, Span

ANSWER = np.arange(100, 120, dtype=np.int32)


def make(drafts, policy, method="ngram"):
    speculation = Speculation(drafts, method=method)
    return make_scheduler(policy, BatchRules(64, 8, async_scheduling=True, speculation=speculation))


def tokens(count):
    """A policy without reuse, whose blocks are single tokens."""
    return UnsharedPolicy(1, CountedBlocks(count, 1))


def request(id, output=20):
    prompt = Span(np.arange(4, dtype=np.int32))
    return Request(id, 0, (prompt,), output, output=ANSWER[:output])


def decoded(step):
    return [sequence.request.id for sequence in step.decodes]


def complete(scheduler, step, now, *accepted):
    """Complete a step: each decode accepts so many drafts, and ends where its output is complete."""
    counts = dict(zip(step.decodes, accepted, strict=True))
    ended = [one for one in counts if one.generated + 1 + counts[one] >= one.request.output_len]
    scheduler.complete(step, now, [one for one in ended if not one.has_ended], accepted)


@pytest.mark.parametrize(("method", "behind"), [("ngram", 0), ("eagle", 3)])
def test_a_step_is_planned_as_if_the_one_in_flight_accepts_all_drafts(method, behind):
    policy = tokens(100)
    scheduler = make(3, policy, method)
    assert type(scheduler) is AsyncSpeculativeScheduler
    scheduler.add(request(0))
    used, generated = [], []
    for now, accepted in enumerate([(), (1,), (0,), (3,), (0,)]):
        step = scheduler.schedule(now)
        used.append(100 - policy.store.num_free)
        complete(scheduler, step, now + 1, *accepted)
        generated += [sequence.generated for sequence in step.decodes]
    assert generated == [1 + 2, 3 + 1, 4 + 4, 8 + 1]
    # The prompt; the step after it; then the tokens before the step in flight, and 4 rows for each of both steps.
    held = [4, 4 + 4, 4 + 4 + 4, (4 + 2) + 4 + 4, (4 + 2 + 1) + 4 + 4]
    assert used == [rows + behind for rows in held]


def test_who_ends_whatever_is_accepted_is_left_out_of_the_planned_step():
    policy = tokens(100)
    scheduler = make(3, policy)
    scheduler.add(request(0, output=2))
    complete(scheduler, scheduler.schedule(0), 1)
    complete(scheduler, scheduler.schedule(1), 2, 0)
    assert scheduler.idle
    assert scheduler.schedule(2) is None
    assert policy.store.num_free == 100


def test_who_ends_by_accepted_drafts_takes_part_once_more():
    policy = tokens(100)
    scheduler = make(3, policy)
    scheduler.add(request(0, output=3))
    complete(scheduler, scheduler.schedule(0), 1)
    last = scheduler.schedule(1)
    complete(scheduler, last, 2, 1)
    assert not scheduler.idle
    after = scheduler.schedule(2)
    assert (decoded(after), after.drafts, policy.store.num_free) == ([0], [3], 100)
    complete(scheduler, after, 3, 0)
    assert (last.decodes[0].generated, last.decodes[0].finished_at) == (3, 2)
    assert scheduler.idle


def test_who_has_ended_gives_way_and_is_not_admitted_again():
    policy = tokens(15)
    scheduler = make(1, policy)
    for id, output in enumerate((20, 3)):
        scheduler.add(request(id, output))
    complete(scheduler, scheduler.schedule(0), 1)
    step = scheduler.schedule(1)
    first, second = step.decodes
    complete(scheduler, step, 2, 1, 1)
    step = scheduler.schedule(2)  # 4 + 2 + 2 tokens of each
    assert (decoded(step), first.preemptions, second.preemptions) == ([0], 0, 1)
    assert (len(scheduler.waiting), policy.store.num_free) == (0, 15 - 8)


def test_who_is_alone_gives_way_to_its_step_in_flight():
    policy = tokens(11)
    scheduler = make(3, policy)
    scheduler.add(request(0))
    complete(scheduler, scheduler.schedule(0), 1)
    step = scheduler.schedule(1)
    complete(scheduler, step, 2, 1)
    again = scheduler.schedule(2)  # 5 + 4 + 4 tokens do not fit; those of the step in flight are computed again
    assert [(chunk.start, chunk.stop) for chunk in again.chunks] == [(5, 7)]
    assert step.decodes[0].preemptions == 1


def stored(policy):
    """Tokens of the prompt and the answer that a later prompt finds."""
    later = replace(request(9), spans=(*request(9).spans, Span(ANSWER)), output=None)
    return policy.match(later, 0).matched


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("method", ["ngram", "eagle"])
@pytest.mark.parametrize("aborted", [False, True])
def test_what_a_step_accepts_is_stored_once_the_next_is_planned(release, method, aborted):
    rules = BlockRules(2, ahead=True, drafts=3, drafter=method == "eagle", release=RELEASES[release])
    policy = BlockPolicy(rules, BlockStore(BlockPool(40), 1, 1), ledger=NoLedger())
    scheduler, answered = make(3, policy, method), request(0, output=3)
    scheduler.add(answered)
    complete(scheduler, scheduler.schedule(0), 1)
    complete(scheduler, scheduler.schedule(1), 2, 1)
    assert stored(policy) == 4
    if aborted:
        assert scheduler.abort(answered, 2) is None
        assert scheduler.idle
    scheduler.schedule(2)
    assert stored(policy) == (4 if aborted else 6)
    assert policy.store.pool.num_free == 40
    policy.check()

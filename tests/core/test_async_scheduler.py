"""Planning ahead: a request joins one step later; ranks in lockstep are the union of their schedules."""

import numpy as np

from spanlab.core.admission import BatchRules
from spanlab.core.ahead import AsyncScheduler, make_scheduler
from spanlab.core.policies.chunks import CountedBlocks, UnsharedPolicy
from spanlab.core.request import Request, Span
from spanlab.core.scheduler import LockstepScheduler, Scheduler
from spanlab.core.step import finished_after

RULES = BatchRules(max_num_batched_tokens=64, max_num_seqs=8)


def make(kind=Scheduler, rules=RULES):
    return kind(UnsharedPolicy(4, CountedBlocks(1000, 1)), rules)


def request(id, prompt=4, output=10):
    return Request(id, 0, (Span(np.zeros(prompt, np.int32)),), output)


def computed(step):
    return [chunk.sequence.request.id for chunk in step.chunks]


def decoded(step):
    return [sequence.request.id for sequence in step.decodes]


def test_a_request_joins_the_step_after_the_planned_one():
    scheduler = make(AsyncScheduler)
    scheduler.add(request(0))
    first = scheduler.schedule(0)
    assert computed(first) == [0]  # no step is planned yet
    scheduler.complete(first, 1, ())
    scheduler.add(request(1))
    planned = scheduler.schedule(1)
    assert (computed(planned), decoded(planned), planned.max_repeats) == ([], [0], 1)
    scheduler.complete(planned, 2, ())
    joined = scheduler.schedule(2)
    assert (computed(joined), decoded(joined)) == ([1], [0])


def test_an_idle_engine_plans_at_once():
    scheduler = make(AsyncScheduler)
    assert scheduler.idle
    scheduler.add(request(0, output=1))
    assert not scheduler.idle
    step = scheduler.schedule(0)
    scheduler.complete(step, 1, [step.chunks[0].sequence])
    scheduler.add(request(1))
    assert computed(scheduler.schedule(1)) == [1]


def test_an_ending_request_holds_memory_during_planning():
    scheduler = make(AsyncScheduler, BatchRules(max_num_batched_tokens=64, max_num_seqs=1))
    free = scheduler.policy.store.num_free
    for id in range(2):
        scheduler.add(request(id, output=2))
    first = scheduler.schedule(0)
    scheduler.complete(first, 1, ())
    last = scheduler.schedule(1)
    scheduler.complete(last, 2, last.decodes)
    assert scheduler.policy.store.num_free < free
    step = scheduler.schedule(2)  # planned again at once: without the second request there is nothing to do
    assert computed(step) == [1]
    assert not scheduler.waiting


def test_a_seat_is_taken_one_step_late_where_others_run():
    scheduler = make(AsyncScheduler, BatchRules(max_num_batched_tokens=64, max_num_seqs=2))
    for id, output in enumerate((2, 10, 10)):
        scheduler.add(request(id, output=output))
    scheduler.complete(scheduler.schedule(0), 1, ())
    last = scheduler.schedule(1)
    scheduler.complete(last, 2, [last.decodes[0]])
    between = scheduler.schedule(2)
    assert (computed(between), decoded(between), between.max_repeats) == ([], [1], 1)
    scheduler.complete(between, 3, ())
    assert computed(scheduler.schedule(3)) == [2]


def test_who_has_ended_gives_way_before_those_admitted_earlier():
    policy = UnsharedPolicy(1, CountedBlocks(10, 1))
    scheduler = AsyncScheduler(policy, RULES)
    scheduler.add(request(0, output=4))
    scheduler.add(request(1, output=2))
    scheduler.complete(scheduler.schedule(0), 1, ())
    last = scheduler.schedule(1)
    first, second = last.decodes
    scheduler.complete(last, 2, [second])
    assert policy.store.num_free == 0
    step = scheduler.schedule(2)
    assert (decoded(step), first.preemptions, second.preemptions) == ([0], 0, 1)


def test_rules_choose_the_scheduler():
    policy = UnsharedPolicy(4, CountedBlocks(10, 1))
    assert type(make_scheduler(policy, BatchRules())) is Scheduler
    assert type(make_scheduler(policy, BatchRules(async_scheduling=True))) is AsyncScheduler


def test_ranks_take_a_step_together():
    scheduler = LockstepScheduler([make(), make()])
    for id in range(3):
        scheduler.add(request(id))
    step = scheduler.schedule(0)
    assert [computed(part) for part in scheduler.rank_steps] == [[0, 2], [1]]
    assert computed(step) == [0, 2, 1]
    scheduler.complete(step, 1, [step.chunks[2].sequence])  # request 1, alone on its rank
    again = scheduler.schedule(1)
    assert [decoded(part) for part in scheduler.rank_steps] == [[0, 2], []]
    assert decoded(again) == [0, 2]
    scheduler.repeat(again, 3)
    scheduler.complete(again, 2, again.decodes)
    assert [sequence.generated for sequence in again.decodes] == [4, 4]
    assert scheduler.idle
    assert scheduler.schedule(2) is None


def test_the_rank_with_fewer_requests_gets_the_next():
    scheduler = LockstepScheduler([make(), make()])
    for id in range(2):
        scheduler.add(request(id))
    step = scheduler.schedule(0)
    scheduler.complete(step, 1, [step.chunks[0].sequence])
    scheduler.add(request(2))
    assert computed(scheduler.schedule(1)) == [2]
    assert [rank.running[0].request.id for rank in scheduler.ranks] == [2, 1]


def test_one_rank_schedules_as_its_scheduler_does():
    alone, ranked = make(), LockstepScheduler([make()])
    for scheduler in (alone, ranked):
        for id in range(12):
            scheduler.add(request(id, prompt=20, output=id + 1))
    for now in range(40):
        steps = [scheduler.schedule(now) for scheduler in (alone, ranked)]
        if steps[0] is None:
            assert steps[1] is None
            break
        assert steps[0].key() == steps[1].key()
        for scheduler, step in zip((alone, ranked), steps, strict=True):
            scheduler.complete(step, now, finished_after(step))
    assert alone.idle and ranked.idle

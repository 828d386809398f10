"""Tokens of each request in each step; only the loop here has output lengths, the scheduler must not read them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.admission import BatchRules
from spanlab.core.placement import branch, every_n, no_states
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request, Span
from spanlab.core.scheduler import Scheduler
from spanlab.core.step import ScheduledSequence, ScheduledStep, finished_after

from . import steps
from .factories import KV, assert_drained, make_budget, make_policy, make_request


def _asked(request):
    raise AssertionError("somebody read the true output length")


class Blind(Request):
    """A request that does not tell how long its output will be."""

    __slots__ = ()
    output_len = property(_asked, lambda request, value: None)


def blind(id: int, tokens) -> Blind:
    return Blind(id, 0, (Span(np.array(tokens, np.int32)),))


def apart(*lengths: int) -> list[Blind]:
    """Prompts that share nothing, ids in order."""
    return [blind(id, np.arange(length) + 1000 * id) for id, length in enumerate(lengths)]


class Loop(steps.Loop):
    """Has the hidden output lengths of requests, and records admissions and computed tokens."""

    def __init__(self, policy: TreePolicy, rules: BatchRules, outputs, jump: int = 1):
        super().__init__(policy, rules, jump)
        self.outputs = outputs
        self.admitted: list[int] = []
        self.computed: dict[int, int] = {}

    def output_len(self, sequence: ScheduledSequence) -> int:
        return self.outputs[sequence.request.id]

    def key(self, step: ScheduledStep) -> tuple:
        chunks, decodes, repeats = step.key()
        return tuple(chunk[:4] for chunk in chunks), decodes, repeats

    def step(self) -> ScheduledStep | None:
        self.before = self.seated(), self.preemptions()
        return super().step()

    def seated(self) -> list[int]:
        return [sequence.request.id for sequence in self.scheduler.running]

    def preemptions(self) -> int:
        everybody = (*self.scheduler.waiting, *self.scheduler.running)
        return sum(sequence.preemptions for sequence in everybody)

    def audit(self, step: ScheduledStep) -> None:
        rules, seated = self.scheduler.rules, self.seated()
        before, preempted = self.before
        assert len(seated) <= rules.max_num_seqs
        new = [id for id in seated if id not in before]
        self.admitted += [id for id in new if id not in self.admitted]
        if self.preemptions() > preempted:
            assert not new, "somebody was admitted in a step that preempted"
        tokens = [chunk.stop - chunk.start for chunk in step.chunks]
        alone = not rules.enable_chunked_prefill and len(tokens) == 1
        assert sum(tokens) + len(step.decodes) <= rules.max_num_batched_tokens or alone
        assert not (rules.prefill_first and step.chunks and step.decodes)
        assert all(chunk.start == chunk.work.start + chunk.sequence.rows_done for chunk in step.chunks)
        assert rules.enable_chunked_prefill or all(chunk.last for chunk in step.chunks)
        ids = [chunk.sequence.request.id for chunk in step.chunks] + [one.request.id for one in step.decodes]
        assert len(ids) == len(set(ids)), "one sequence twice in a step"
        for chunk, computed in zip(step.chunks, tokens, strict=True):
            id = chunk.sequence.request.id
            self.computed[id] = self.computed.get(id, 0) + computed


def chunk(id, start, stop, captures=()):
    return id, start, stop, captures


def plan(*chunks, decodes=(), repeats=1):
    return chunks, decodes, repeats


@pytest.mark.parametrize(
    ("rules", "finished", "expected"),
    [
        (
            BatchRules(4, 3),
            [2, 0, 1],
            [
                plan(chunk(0, 0, 4)),
                plan(chunk(0, 4, 6), chunk(1, 0, 2)),
                plan(chunk(1, 2, 3), chunk(2, 0, 2), decodes=(0,)),
                plan(decodes=(0, 1)),
            ],
        ),
        (
            BatchRules(4, 3, prefill_first=True),
            [2, 1, 0],
            [
                plan(chunk(0, 0, 4)),
                plan(chunk(0, 4, 6), chunk(1, 0, 2)),
                plan(chunk(1, 2, 3), chunk(2, 0, 2)),
                plan(decodes=(0, 1)),
                plan(decodes=(0,)),
            ],
        ),
        (
            BatchRules(4, 3, enable_chunked_prefill=False),
            [0, 1, 2],
            [plan(chunk(0, 0, 6)), plan(chunk(1, 0, 3), decodes=(0,)), plan(chunk(2, 0, 2), decodes=(0, 1))],
        ),
        (
            BatchRules(4, 3, enable_chunked_prefill=False, prefill_first=True),
            [2, 1, 0],
            [
                plan(chunk(0, 0, 6)),
                plan(chunk(1, 0, 3)),
                plan(chunk(2, 0, 2)),
                plan(decodes=(0, 1)),
                plan(decodes=(0,)),
            ],
        ),
        (
            BatchRules(4, 1),
            [0, 1, 2],
            [
                plan(chunk(0, 0, 4)),
                plan(chunk(0, 4, 6)),
                plan(decodes=(0,)),
                plan(decodes=(0,)),
                plan(chunk(1, 0, 3)),
                plan(decodes=(1,)),
                plan(chunk(2, 0, 2)),
            ],
        ),
    ],
    ids=["mixed", "prefill-first", "unchunked", "unchunked-prefill-first", "one-seat"],
)
def test_steps_are_filled_as_worked_out_by_hand(rules, finished, expected):
    loop = Loop(make_policy(), rules, {0: 3, 1: 2, 2: 1})
    assert loop.run(apart(6, 3, 2)) == expected
    assert [sequence.request.id for sequence in loop.finished] == finished
    assert loop.computed == {0: 6, 1: 3, 2: 2}


def test_chunks_name_the_states_that_they_leave():
    loop = Loop(make_policy(hybrid=True, grid=2), BatchRules(4), {0: 1})
    assert loop.run(apart(7)) == [plan(chunk(0, 0, 4, (2, 4))), plan(chunk(0, 4, 7, (6,)))]
    assert loop.finished[0].captured == 3


@pytest.mark.parametrize("hybrid", [False, True])
def test_kv_is_reused_within_a_step_and_states_after(hybrid):
    loop = Loop(make_policy(hybrid=hybrid), BatchRules(), {0: 1, 1: 1, 2: 1})
    for id in (0, 1):
        loop.scheduler.add(blind(id, range(6)))
    first = loop.step()
    # states are usable from the next step on, keys and values in the step that computes them
    expected = [(0, 6), (0, 6)] if hybrid else [(0, 6), (5, 6)]
    assert [(c.start, c.stop) for c in first.chunks] == expected
    assert first.loads == []
    loop.scheduler.add(blind(2, range(6)))
    second = loop.step()
    assert [(c.start, c.stop) for c in second.chunks] == [(5, 6)]
    assert [sequence.request.id for sequence in second.loads] == ([2] if hybrid else [])
    assert loop.step() is None
    assert_drained(loop.policy)


def test_a_chunk_in_flight_serves_the_next_step():
    loop = Loop(make_policy(), BatchRules(4), {0: 1, 1: 1})
    loop.scheduler.add(blind(0, range(6)))
    loop.step()
    loop.scheduler.add(blind(1, range(6)))
    loop.run([])
    # request 1 starts in the second step, after all tokens of request 0
    assert loop.keys[1] == plan(chunk(0, 4, 6), chunk(1, 5, 6))


def test_a_wholly_known_prompt_still_takes_one_token():
    loop = Loop(make_policy(), BatchRules(), {0: 1, 1: 1})
    loop.run([blind(0, range(5))])
    assert loop.run([blind(1, range(5))])[-1] == plan(chunk(1, 4, 5))


def test_a_fully_stored_prompt_takes_an_empty_chunk():
    loop = Loop(make_policy(last_token=True), BatchRules(), {0: 1, 1: 2})
    loop.run([blind(0, range(5))])
    assert loop.run([blind(1, range(5))])[-2:] == [plan(chunk(1, 5, 5)), plan(decodes=(1,))]


# -- preemption -------------------------------------------------------------------------------------------------------


def test_the_tail_gives_way_and_computes_again():
    loop = Loop(make_policy(make_budget(tokens=12)), BatchRules(), {0: 6, 1: 6})
    # 4 + 4 prompt tokens and two decodes each fill 12; from then on there is room for one of them
    assert loop.run(apart(4, 4)) == [
        plan(chunk(0, 0, 4), chunk(1, 0, 4)),
        plan(decodes=(0, 1)),
        plan(decodes=(0, 1)),
        plan(decodes=(0,)),
        plan(decodes=(0,)),
        plan(decodes=(0,)),
        plan(chunk(1, 0, 7)),
        plan(decodes=(1,)),
        plan(decodes=(1,)),
    ]
    first, second = loop.finished
    assert (first.request.id, first.preemptions, first.recomputed, first.generated) == (0, 0, 0, 6)
    # it had the KV of its prompt and of two outputs; the third output had only been drawn
    assert (second.request.id, second.preemptions, second.recomputed, second.generated) == (1, 1, 6, 6)


def test_what_was_stored_before_a_preemption_is_not_computed_again():
    loop = Loop(make_policy(make_budget(tokens=12)), BatchRules(5), {0: 4, 1: 1})
    assert loop.run(apart(4, 8)) == [
        plan(chunk(0, 0, 4), chunk(1, 0, 1)),
        plan(decodes=(0,)),
        plan(decodes=(0,)),
        plan(decodes=(0,)),
        plan(chunk(1, 1, 6)),
        plan(chunk(1, 6, 8)),
    ]
    assert (loop.finished[1].preemptions, loop.finished[1].recomputed) == (1, 0)
    assert loop.finished[1].first_plan.resume == 0, "records speak of the first admission"


def test_one_request_that_outgrows_the_memory_is_an_error():
    loop = Loop(make_policy(make_budget(tokens=6)), BatchRules(), {0: 9})
    with pytest.raises(AssertionError, match="nothing was planned"):  # preempted, it does not fit any more
        loop.run(apart(4))


def test_a_placement_observes_once_per_admission():
    observed = []

    class Counting:
        def observe(self, prefill):
            observed.append(prefill.prompt)

        def place(self, prefill):
            return (4,)

    policy = make_policy(make_budget(tokens=17), hybrid=True, placer=Counting())
    loop = Loop(policy, BatchRules(), {0: 12, 1: 8})
    loop.run(apart(4, 5))
    assert sum(sequence.preemptions for sequence in loop.finished) == 1
    assert len(observed) == 3


# -- several equal steps in one call ----------------------------------------------------------------------------------


def test_max_repeats_is_what_memory_allows():
    loop = Loop(make_policy(make_budget(tokens=12)), BatchRules(), {0: 9})
    loop.scheduler.add(apart(4)[0])
    prefill = loop.scheduler.schedule(0)
    assert prefill.max_repeats == 1
    loop.scheduler.complete(prefill, 1, [])
    step = loop.scheduler.schedule(1)
    assert step.max_repeats == 8
    loop.scheduler.repeat(step, 8)
    assert step.key() == plan(decodes=(0,), repeats=8)
    assert loop.policy.store.kv_reserved == 8 * KV
    assert loop.policy.store.spare_tokens() == 0
    loop.scheduler.complete(step, 9, step.decodes)
    assert loop.scheduler.idle
    assert_drained(loop.policy)


def test_a_step_that_preempted_is_not_repeated():
    loop = Loop(make_policy(make_budget(tokens=12)), BatchRules(), {0: 6, 1: 6}, jump=100)
    # the second plan covers two equal steps, the third preempts
    assert loop.run(apart(4, 4))[1:4] == [
        plan(decodes=(0, 1), repeats=2),
        plan(decodes=(0,), repeats=1),
        plan(decodes=(0,), repeats=2),
    ]


workloads = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.integers(1, 8)), min_size=1, max_size=9
)
policies = st.fixed_dictionaries(
    {
        "hybrid": st.booleans(),
        "private": st.booleans(),
        "eviction": st.sampled_from(["lru", "fifo", "lfu"]),
        "block_size": st.sampled_from([1, 2, 4]),
        "keeps": st.sampled_from([True, True, True, False]),
        "last_token": st.booleans(),
        "placer": st.sampled_from([None, branch(), no_states()]),
    }
)
# room for the longest request twice, which a match inside a long edge can need
budgets = st.builds(
    make_budget,
    tokens=st.none() | st.integers(20, 80),
    states=st.none() | st.integers(7, 12),
    total=st.none() | st.integers(20 * KV + 10, 300),
    entries=st.none() | st.integers(1, 5),
)


@settings(deadline=None, max_examples=120)
@given(workload=workloads, rules=steps.batches, options=policies, budget=budgets)
def test_every_request_finishes_in_any_setting(workload, rules, options, budget):
    requests = [blind(id, tokens) for id, (tokens, _) in enumerate(workload)]
    outputs = {id: output for id, (_, output) in enumerate(workload)}
    loop = Loop(make_policy(budget, **options), rules, outputs)
    keys = loop.run(requests)
    assert sorted(sequence.request.id for sequence in loop.finished) == sorted(outputs)
    assert loop.admitted == sorted(outputs), "admitted out of order"
    for sequence in loop.finished:
        assert sequence.generated == outputs[sequence.request.id]
        assert sequence.admitted_at < sequence.first_token_at <= sequence.finished_at
        if not sequence.preemptions:
            assert loop.computed[sequence.request.id] == sequence.request.num_tokens - sequence.first_plan.resume
            assert sequence.recomputed == 0
    jumping = Loop(make_policy(budget, **options), rules, outputs, jump=100)
    assert steps.unroll(jumping.run(requests)) == steps.unroll(keys)
    again = Loop(make_policy(budget, **options), rules, outputs)
    assert again.run(requests) == keys


@settings(deadline=None, max_examples=100)
@given(workload=workloads, rules=steps.batches, later=st.lists(st.integers(0, 12), min_size=9, max_size=9))
def test_requests_that_come_later_are_served_in_order_of_arrival(workload, rules, later):
    outputs = {id: output for id, (_, output) in enumerate(workload)}
    loop = Loop(make_policy(make_budget(tokens=45)), rules, outputs)
    arrivals = sorted(zip(later, range(len(workload)), strict=False))
    for number in range(13):
        for due, id in arrivals:
            if due == number:
                loop.scheduler.add(blind(id, workload[id][0]))
        loop.step()
    loop.run([])
    assert loop.admitted == [id for _, id in arrivals]
    assert sorted(sequence.request.id for sequence in loop.finished) == sorted(outputs)


def test_the_blind_request_refuses_reads_of_its_length():
    with pytest.raises(AssertionError, match="true output length"):
        _ = blind(0, [1]).output_len


# -- A step that preempted admits no request, even if the freed memory would suffice (vLLM's rule). ---


PROMPTS = [[0, 1, 50, 51, 52], [*range(9), *range(150, 155)], [*range(5), *range(250, 256)]]
OUTPUTS = [2, 4, 3]
BUDGETS = range(60, 100, 2)  # bytes of KV and states together


def scheduler_of(budget: int) -> Scheduler:
    """Three requests that share beginnings on a hybrid, none of them served yet."""
    policy = make_policy(make_budget(total=budget), hybrid=True, placer=every_n(4), block_size=4, fixed_blocks=True)
    scheduler = Scheduler(policy, BatchRules(max_num_batched_tokens=3, max_num_seqs=4))
    for id, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        scheduler.add(make_request(prompt, id=id, output=output))
    return scheduler


def admitted_while_preempting(budget: int) -> tuple[int, list[int]]:
    """How many steps preempted, and the requests that these steps computed and that did not run before them."""
    scheduler, preempting, admitted = scheduler_of(budget), 0, []
    for now in range(200):
        waiting = list(scheduler.waiting)
        before = {sequence: sequence.preemptions for sequence in (*waiting, *scheduler.running)}
        step = scheduler.schedule(now)
        if step is None:
            break
        preempted = [sequence for sequence, count in before.items() if sequence.preemptions > count]
        preempting += bool(preempted)
        if preempted:
            admitted += [c.sequence.request.id for c in step.chunks if c.sequence in (*waiting, *preempted)]
        scheduler.complete(step, now + 1, finished_after(step))
    assert scheduler.idle
    return preempting, admitted


@pytest.mark.parametrize("budget", BUDGETS)
def test_preempting_step_admits_no_request(budget: int):
    assert admitted_while_preempting(budget)[1] == []


def test_budgets_of_these_tests_do_preempt():
    assert sum(admitted_while_preempting(budget)[0] for budget in BUDGETS) >= 3

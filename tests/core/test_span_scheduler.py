"""Steps of prompts made of spans: chunks, repairs cut and uncut, preemption; every row accounted for."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.admission import BatchRules
from spanlab.core.plan import RepairPass
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.repair import Repair
from spanlab.core.request import Request, Span
from spanlab.core.step import ScheduledChunk, ScheduledStep
from spanlab.core.tree import as_seen, conditioned, isolated

from . import steps
from .factories import doc, make_budget, make_policy, make_prompt, resumes, text


class Loop(steps.Loop):
    """Counts every row of every request: (cache span, place), or ("repair", number)."""

    def __init__(self, policy: TreePolicy, rules: BatchRules, jump: int = 1):
        super().__init__(policy, rules, jump)
        self.rows: dict[int, list[tuple[int, int]]] = {}  # by request, in order, with repetitions
        self.allocation: dict[int, object] = {}
        self.expected: dict[int, tuple[int, int]] = {}  # by request: work in progress, rows done
        self.reached: dict[int, int] = {}  # by request: where the last chunk of a repair ended

    def audit(self, step: ScheduledStep) -> None:
        rules = self.scheduler.rules
        for chunk in step.chunks:
            self.follow(chunk)
        rows = sum(chunk.tokens for chunk in step.chunks) + len(step.decodes)
        if rules.enable_chunked_prefill:
            last = step.chunks[-1] if step.chunks else None
            uncut = last is not None and isinstance(last.work, RepairPass) and not self.policy.rules.repair.cuts
            alone = uncut and rows - last.tokens < rules.max_num_batched_tokens
            rows += sum(chunk.work.shallow for chunk in step.chunks)
            assert rows <= rules.max_num_batched_tokens or alone, (
                "only an uncut repair may take more, and nobody after it"
            )
        else:
            assert rows <= rules.max_num_batched_tokens or len({id(chunk.sequence) for chunk in step.chunks}) == 1
            finishing = [chunk.sequence for chunk in step.chunks if chunk.last]
            assert all(chunk.sequence in finishing for chunk in step.chunks), "a prompt was cut"
        assert not (rules.prefill_first and step.chunks and step.decodes)

    def follow(self, chunk: ScheduledChunk) -> None:
        """Each chunk starts where the last one of its request ended, and a repair is one chunk."""
        id, work = chunk.sequence.request.id, chunk.work
        if self.allocation.get(id) is not chunk.sequence.allocation:
            self.allocation[id], self.expected[id] = chunk.sequence.allocation, (0, 0)
        work_index, rows_done = self.expected[id]
        assert work is chunk.sequence.work[work_index]
        assert 0 < chunk.tokens <= work.tokens - rows_done or (chunk.tokens == work.tokens == 0)
        if isinstance(work, RepairPass) and not chunk.sequence.allocation.plan.repair.cuts:
            assert (chunk.start, chunk.stop, chunk.tokens) == (work.start, work.stop, work.tokens)
        if isinstance(work, RepairPass):
            begins, ends = rows_done == 0, rows_done + chunk.tokens == work.tokens
            assert (chunk.start == work.start, chunk.stop == work.stop) == (begins, ends)
            assert begins or chunk.start == self.reached[id], "no gap between the chunks of a repair"
            self.reached[id] = chunk.stop
        else:
            assert (chunk.start, chunk.stop) == (work.start + rows_done, work.start + rows_done + chunk.tokens)
        rows_done += chunk.tokens
        self.expected[id] = (work_index + 1, 0) if rows_done == work.tokens else (work_index, rows_done)
        assert chunk.last == (self.expected[id] == (len(chunk.sequence.work), 0))
        computed = self.rows.setdefault(id, [])
        rows = work.cache_span_rows(chunk.sequence.allocation.plan, chunk.start, chunk.stop)
        if isinstance(work, RepairPass):
            rows.append(("repair", *work.repaired_rows(chunk.sequence.allocation.plan, chunk.start, chunk.stop)))
        for cache_span, start, stop in rows:
            computed += [(cache_span, position) for position in range(start, stop)]


DOCUMENTS = [doc(*range(10 * n, 10 * n + length)) for n, length in ((1, 5), (2, 3), (3, 4), (4, 1))]
spans = st.sampled_from(DOCUMENTS) | st.lists(st.integers(0, 1), min_size=1, max_size=3).map(lambda t: text(*t))
workloads = st.lists(st.tuples(st.lists(spans, min_size=1, max_size=5), st.integers(1, 8)), min_size=1, max_size=7)
REPAIRS = [
    (Repair(), False),
    (Repair(), True),
    (Repair("first", k=2), False),
    (Repair("first", k=9), False),
    (Repair("first", k=9, chunked=False), False),
    (Repair("strided", ratio=0.1), True),
    (Repair("random", ratio=0.5), False),
    (Repair("deviation", ratio=0.2), True),
    (Repair("deviation_gradual", ratio=0.6), True),
]
# the longest prompt has 25 tokens, all of which it may hold twice, and 8 of output
budgets = st.builds(make_budget, tokens=st.none() | st.integers(58, 90), entries=st.none() | st.integers(2, 8))
policies = st.fixed_dictionaries(
    {
        "layout": st.sampled_from([isolated, conditioned, as_seen]),
        "block_size": st.sampled_from([1, 2, 4]),
        "eviction": st.sampled_from(["lru", "fifo", "lfu"]),
    }
)


@settings(deadline=None, max_examples=100)
@given(workload=workloads, rules=steps.batches, options=policies, repair=st.sampled_from(REPAIRS), budget=budgets)
def test_every_request_finishes_and_every_row_is_accounted_for(workload, rules, options, repair, budget):
    requests = [make_prompt(*parts, id=id, output=output) for id, (parts, output) in enumerate(workload)]

    def policy() -> TreePolicy:
        return make_policy(budget, repair=repair[0], copies=repair[1], **options)

    loop = Loop(policy(), rules)
    keys = loop.run(requests)
    assert sorted(sequence.request.id for sequence in loop.finished) == list(range(len(requests)))
    for sequence in loop.finished:
        rows = loop.rows[sequence.request.id]
        assert sequence.generated == sequence.request.output_len
        if not sequence.preemptions:
            assert len(rows) == len(set(rows)) == sequence.first_plan.rows
            assert sequence.recomputed == 0
        assert sequence.recomputed >= len(rows) - len(set(rows)), "rows that were computed again"
    assert steps.unroll(Loop(policy(), rules, jump=100).run(requests)) == steps.unroll(keys)


# -- by hand ----------------------------------------------------------------------------------------------------------


def planned(loop: Loop) -> list[tuple]:
    """Per step: (request, cache span, start, stop, rows) of each chunk, and who decodes."""
    return [(tuple((c[0], c[4], c[1], c[2], c[-1]) for c in chunks), decodes) for chunks, decodes, _ in loop.keys]


def numbers(start: int, count: int, independent: bool = False) -> Span:
    return Span(np.arange(start, start + count, dtype=np.int32), independent)


def prompt(id: int, *parts: Span, output: int = 1) -> Request:
    return make_prompt(*parts, id=id, output=output)


def test_a_chunked_repair_goes_by_position_with_the_text_between():
    """Rows 1 to 3 and 5 to 7 of two spans, and the text between them at 4; a decode goes on meanwhile."""
    policy = make_policy(layout=isolated, repair=Repair("first", k=3))
    loop, spans = Loop(policy, BatchRules(4, 4)), (numbers(10, 3, True), numbers(30, 1), numbers(20, 3, True))
    loop.run([prompt(0, numbers(100, 1), output=9), prompt(1, numbers(0, 1), *spans, numbers(40, 1))])
    assert [chunks for chunks, _ in planned(loop)][2:5] == [
        ((1, 3, 7, 8, 1), (1, "repair", 1, 3, 2)),
        ((1, "repair", 3, 6, 3),),
        ((1, "repair", 6, 8, 2), (1, 4, 8, 9, 1)),
    ]
    assert all(decodes == (0,) for _, decodes in planned(loop)[1:5])
    assert resumes(policy.match(prompt(2, numbers(0, 1), *spans, numbers(40, 1)), 9))[2] == 1


def test_rows_that_a_measured_repair_leaves_out_count_against_the_budget():
    """Of eight rows two are chosen; all eight count, so the prompt that began before waits for a step."""
    policy = make_policy(layout=isolated, repair=Repair("deviation", ratio=0.25), copies=True)
    loop = Loop(policy, BatchRules(8, 4))
    loop.run([prompt(0, numbers(0, 1), numbers(10, 7, True), numbers(20, 1)), prompt(1, numbers(100, 9))])
    assert planned(loop) == [
        (((0, 0, 0, 1, 1), (0, 1, 1, 8, 7)), ()),
        (((0, "repair", 1, 8, 1), (0, 2, 8, 9, 1)), ()),
        (((1, 0, 0, 8, 8),), ()),
        (((1, 0, 8, 9, 1),), ()),
    ]


def test_a_repair_above_the_budget_delays_started_requests():
    """Twelve rows are repaired at once, of a budget of eight; the second prompt, begun before, waits for a step."""
    loop = Loop(make_policy(layout=isolated, repair=Repair("first", k=6, chunked=False)), BatchRules(8, 4))
    first = prompt(0, numbers(0, 1), numbers(10, 6, True), numbers(20, 6, True), numbers(30, 1))
    loop.run([first, prompt(1, numbers(100, 10))])
    assert planned(loop) == [
        (((0, 0, 0, 1, 1), (0, 1, 1, 7, 6), (0, 2, 7, 8, 1)), ()),
        (((0, 2, 8, 13, 5), (1, 0, 0, 3, 3)), ()),
        (((0, "repair", 1, 13, 12),), ()),
        (((0, 3, 13, 14, 1), (1, 0, 3, 10, 7)), ()),
    ]


def test_a_repair_runs_while_others_decode():
    loop = Loop(make_policy(layout=isolated, repair=Repair("first", k=6)), BatchRules(4, 4))
    loop.run([prompt(0, numbers(0, 2), output=5), prompt(1, numbers(5, 1), numbers(10, 6, True), numbers(20, 1))])
    assert planned(loop) == [
        (((0, 0, 0, 2, 2), (1, 0, 0, 1, 1), (1, 1, 1, 2, 1)), ()),
        (((1, 1, 2, 5, 3),), (0,)),
        (((1, 1, 5, 7, 2), (1, "repair", 1, 2, 1)), (0,)),
        (((1, "repair", 2, 5, 3),), (0,)),
        (((1, "repair", 5, 7, 2), (1, 2, 7, 8, 1)), (0,)),
    ]


def test_without_chunks_repaired_rows_count_against_the_budget():
    """Both prompts have 4 tokens, but the second computes two of them twice: 6 rows, more than the 4 that are left."""
    rules = BatchRules(8, 4, enable_chunked_prefill=False)
    loop = Loop(make_policy(layout=isolated, repair=Repair("first", k=4)), rules)
    loop.run([prompt(0, numbers(100, 4)), prompt(1, numbers(1, 1), numbers(10, 2, True), numbers(30, 1))])
    assert planned(loop) == [
        (((0, 0, 0, 4, 4),), ()),
        (((1, 0, 0, 1, 1), (1, 1, 1, 3, 2), (1, "repair", 1, 3, 2), (1, 2, 3, 4, 1)), ()),
    ]


def test_text_that_a_repair_takes_along_is_kept():
    policy = make_policy(layout=isolated, repair=Repair("first", k=1))
    request = prompt(0, numbers(0, 1), numbers(10, 3, True), numbers(20, 2), numbers(30, 4, True), numbers(40, 2))
    loop = Loop(policy, BatchRules())
    loop.run([request])
    assert planned(loop)[0][0][3] == (0, "repair", 1, 10, 1 + 2 + 1)
    assert resumes(policy.match(request, 9)) == [1, 3, 2, 4, 1]


def test_repeated_repairs_of_a_preempted_request_are_counted():
    """Memory is full when both have decoded two tokens; the second comes back when the first has gone.

    Its prompt is found again but for the last token. That, four repaired rows and two of its three outputs had been
    computed before; the third output had only been drawn.
    """
    policy = make_policy(make_budget(tokens=22), layout=isolated, repair=Repair("first", k=4))
    loop = Loop(policy, BatchRules())
    second = prompt(1, numbers(1, 1), numbers(10, 8, True), numbers(30, 1), output=4)
    loop.run([prompt(0, numbers(100, 4), output=9), second])
    late = next(sequence for sequence in loop.finished if sequence.request.id == 1)
    assert late.preemptions == 1
    assert planned(loop)[-1] == (((1, "repair", 1, 9, 4), (1, 2, 9, 13, 4)), ())
    assert late.recomputed == 4 + 1 + 2


def test_late_rows_count_as_computed_once():
    """Preempted before its repair: the text between the spans precedes the computed tokens, and is new."""
    policy = make_policy(make_budget(tokens=19), layout=isolated, repair=Repair("first", k=1, chunked=False))
    loop = Loop(policy, BatchRules(5))
    spans = numbers(10, 3, True), numbers(20, 1), numbers(30, 4, True), numbers(40, 2)
    loop.run([prompt(0, numbers(100, 4), output=5), prompt(1, numbers(1, 1), *spans)])
    late = next(sequence for sequence in loop.finished if sequence.request.id == 1)
    assert (late.preemptions, late.recomputed) == (1, 0)

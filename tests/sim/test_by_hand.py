"""Small runs worked out by hand, to the nanosecond and step by step."""

import numpy as np
import pytest
import simpy

from spanlab.core import placement
from spanlab.core.admission import BatchRules
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import UNLIMITED, Budget, Request, Span
from spanlab.core.rules import CacheRules, ReuseRules
from spanlab_sim.timing import ConstantTiming

from ..support.policies import make_tree_policy
from . import serving

MS = 1_000_000
#: 10 ms per step, 1 ms per prompt token, 2 ms per decoded token
TIMING = ConstantTiming(0.001, seconds_per_step=0.01, seconds_per_decode_token=0.002)


def make_policy(placer=None, kv_bytes=UNLIMITED, total_bytes=UNLIMITED, block_size=1, **rules) -> TreePolicy:
    """A token takes 1 byte, a state 10."""
    budget = Budget(kv_bytes=kv_bytes, total_bytes=total_bytes)
    return make_tree_policy(ReuseRules(**rules), budget=budget, placer=placer, block_size=block_size)


def make_request(number: int, at_ms: float, output: int, *parts: range) -> Request:
    tokens = np.concatenate([np.array(tokens_of_span, dtype=np.int32) for tokens_of_span in parts])
    return Request(number, 0, (Span(tokens),), output, round(at_ms * MS))


def serve(requests, rules, policy=None, jump=True):
    """Records by id, and per step: start in ms, chunks, decodes, repeats, who reads a stored state; and the row."""
    log = []

    def on_step(step, now, result) -> None:
        chunks = tuple((chunk.sequence.request.id, *chunk[1:4]) for chunk in step.chunks)
        loads = tuple(sequence.request.id for sequence in step.loads)
        log.append((now / MS, chunks, *step.key()[1:], loads))

    policy = policy or make_policy(keeps=False)
    records, row = serving.serve(requests, policy, TIMING, rules, jump=jump, on_step=on_step)
    return records, log, row


def times_ms(record) -> list[float]:
    """Arrival, admission, first token, end; whole nanoseconds."""
    moments = (record.arrived_s, record.admitted_s, record.first_token_s, record.finished_s)
    return [round(moment * 1e9) / MS for moment in moments]


@pytest.mark.parametrize("jump", [True, False])
def test_one_request(jump):
    records, _, row = serve([make_request(0, 7, 3, range(5))], BatchRules(), jump=jump)
    assert times_ms(records[0]) == [7, 7, 7 + 15, 7 + 15 + 2 * 12]
    assert (row.steps, row.busy_s, row.makespan_s) == (3, 39 * MS * 1e-9, 46 * MS * 1e-9)


def test_a_prompt_that_arrives_later_has_seen_all_of_the_first():
    """Two equal prompts, the second while the first one is being computed; a third once both have finished."""
    requests = [make_request(number, at_ms, 1, range(6)) for number, at_ms in enumerate((0, 2, 100))]
    rules = BatchRules(max_num_batched_tokens=4, max_num_seqs=2)
    records, _, _ = serve(requests, rules, make_policy(cache=CacheRules(share_step=False)))
    causes = ("seen_tokens", "reused_tokens", "lost_never_seen", "lost_out_of_reach", "lost_last_token")
    assert [[getattr(records[number], cause) for cause in causes] for number in range(3)] == [
        [0, 0, 6, 0, 0],
        [6, 4, 0, 2, 0],  # admitted with the second chunk of the first: four tokens are computed
        [6, 5, 0, 0, 1],
    ]


OVERLAPPING = [make_request(0, 0, 4, range(3)), make_request(1, 5, 2, range(100, 106))]


@pytest.mark.parametrize("jump", [True, False])
def test_two_overlapping_requests_in_mixed_steps(jump):
    records, log, _ = serve(OVERLAPPING, BatchRules(max_num_batched_tokens=4, max_num_seqs=2), jump=jump)
    assert log == [
        (0, ((0, 0, 3, ()),), (), 1, ()),
        (13, ((1, 0, 3, ()),), (0,), 1, ()),  # 10 + 3 + 2
        (28, ((1, 3, 6, ()),), (0,), 1, ()),
        (43, (), (0, 1), 1, ()),  # 10 + 2 · 2
    ]
    assert times_ms(records[0]) == [0, 0, 13, 57]
    assert times_ms(records[1]) == [5, 13, 43, 57]


def test_two_overlapping_requests_with_prompts_first():
    records, log, _ = serve(OVERLAPPING, BatchRules(max_num_batched_tokens=4, max_num_seqs=2, prefill_first=True))
    assert log == [
        (0, ((0, 0, 3, ()),), (), 1, ()),
        (13, ((1, 0, 4, ()),), (), 1, ()),
        (27, ((1, 4, 6, ()),), (), 1, ()),
        (39, (), (0, 1), 1, ()),
        (53, (), (0,), 2, ()),
    ]
    assert times_ms(records[0]) == [0, 0, 13, 77]
    assert times_ms(records[1]) == [5, 13, 39, 53]


@pytest.mark.parametrize(
    ("adaptive", "steps"),
    [
        (False, [(18, ((0, 8, 10, ()), (1, 0, 2, ())), (), 1, ()), (32, ((1, 2, 4, ()),), (0,), 1, ())]),
        (True, [(18, ((0, 8, 10, ()), (1, 0, 4, ())), (), 1, ()), (34, (), (0,), 1, ())]),  # at most 8 / 2 tokens
    ],
)
def test_long_prompts_are_limited_beside_others(adaptive, steps):
    limit = {"long_prefill_token_threshold": 2, "long_prefill_token_threshold_adaptive": adaptive}
    requests = [make_request(0, 0, 2, range(10)), make_request(1, 5, 1, range(100, 104))]
    records, log, _ = serve(requests, BatchRules(max_num_batched_tokens=8, max_num_seqs=2, **limit))
    assert log == [(0, ((0, 0, 8, ()),), (), 1, ()), *steps]
    assert times_ms(records[0]) == [0, 0, steps[1][0], 46]


def test_the_golden_run():
    """A hybrid model, states every 4 tokens, a prompt in two chunks, an arrival exactly at a step's end, a loaded
    state, and a jump over three equal steps."""
    document = range(8)
    requests = [make_request(0, 0, 6, document, range(50, 52)), make_request(1, 30, 4, document, range(60, 63))]
    policy = make_policy(placement.every_n(4), needs_states=True, grid=4)
    records, log, row = serve(requests, BatchRules(max_num_batched_tokens=8, max_num_seqs=2), policy)
    assert log == [
        (0, ((0, 0, 8, (4, 8)),), (), 1, ()),
        (18, ((0, 8, 10, ()),), (), 1, ()),
        (30, (), (0,), 1, ()),  # the step before ended as request 1 arrived: it came too late for this one
        (42, ((1, 8, 11, ()),), (0,), 1, (1,)),
        (57, (), (0, 1), 3, ()),
    ]
    assert times_ms(records[0]) == [0, 0, 30, 99]
    assert times_ms(records[1]) == [30, 42, 57, 99]
    late = records[1]
    assert (late.seen_tokens, late.matched_tokens, late.reused_tokens, late.computed_tokens) == (8, 8, 8, 3)
    assert (late.loaded_state_bytes, late.captured_states, records[0].captured_states) == (10, 0, 2)
    assert (row.steps, row.busy_s, row.makespan_s) == (7, 99 * MS * 1e-9, 99 * MS * 1e-9)
    # 8 KV bytes from 18 to 30 ms, 10 to 57 ms, 13 to the end; both states from 18 ms on
    assert row.kv_resident_mean_bytes == pytest.approx((8 * 12 + 10 * 27 + 13 * 42) / 99)
    assert row.state_resident_mean_bytes == pytest.approx(20 * 81 / 99)
    assert (row.kv_resident_peak_bytes, row.state_resident_peak_bytes) == (13, 20)


def count_events(monkeypatch, requests) -> int:
    scheduled = []
    schedule = simpy.Environment.schedule
    with monkeypatch.context() as patch:
        patch.setattr(simpy.Environment, "schedule", lambda env, *a, **b: (scheduled.append(1), schedule(env, *a, **b)))
        serve(requests, BatchRules())
    return len(scheduled)


@pytest.mark.parametrize("output", [2, 10_000])
def test_events_count_spans_and_not_tokens(monkeypatch, output):
    # a process starts, the arrival, the prompt's step, and one span however long
    assert count_events(monkeypatch, [make_request(0, 0, output, range(5))]) == 1 + 1 + 1 + 1


def test_an_arrival_costs_a_cut_and_a_finish_a_span(monkeypatch):
    requests = [make_request(i, 100 * i, 10_000, range(5)) for i in range(4)]
    # start of a process; a wake-up; three waits for arrivals, and three for steps that end at these times; per
    # request its prompt's step, and the span after it, which the next arrival cuts or a finish ends
    assert count_events(monkeypatch, requests) == 1 + 1 + 3 + 3 + 4 + 4 + 3


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_request_that_fits_alone_is_served_whatever_the_cache_holds():
    # The second shares 5 tokens with the 90 that are kept: holding those 90 and computing 45 would need 135 of 100.
    requests = [make_request(0, 0, 1, range(90)), make_request(1, 1_000, 1, range(5), range(500, 545))]
    records, _, _ = serve(requests, BatchRules(), make_policy(kv_bytes=100))
    assert sorted(records) == [0, 1]


def test_a_kept_state_does_not_block_a_request_that_fits():
    # 17 tokens and its own state fit into 28; the state at 4 that it could start from makes 37.
    requests = [make_request(0, 0, 1, range(4)), make_request(1, 1_000, 1, range(4), range(50, 63))]
    policy = make_policy(placement.every_n(4), total_bytes=28, needs_states=True, grid=4)
    assert sorted(serve(requests, BatchRules(), policy)[0]) == [0, 1]


def test_a_request_that_fits_alone_may_grow_whatever_it_has_matched():
    # Pages of 4: the second reuses 8 of the 16 tokens kept in one edge, computes 3 and decodes 2: 13 of 19.
    requests = [make_request(0, 0, 1, range(18)), make_request(1, 1_000, 2, range(8), range(500, 503))]
    records, _, _ = serve(requests, BatchRules(), make_policy(kv_bytes=19, block_size=4))
    assert records[1].reused_tokens == 8


@pytest.mark.parametrize("prefill_first", [False, True])
def test_jumped_steps_admit_a_refused_request_at_the_same_step(prefill_first):
    # While the second decodes, it evicts the first's entries; the third would match 5 of their tokens.
    requests = [
        make_request(0, 0, 1, range(60)),
        make_request(1, 1_000, 60, range(200, 210)),
        make_request(2, 1_050, 1, range(5), range(500, 545)),
    ]
    rules = BatchRules(prefill_first=prefill_first)
    jumped, stepped = (serve(requests, rules, make_policy(kv_bytes=100), jump)[0] for jump in (True, False))
    assert jumped == stepped


def test_jumped_steps_admit_a_refused_state_at_the_same_step():
    # While the third decodes it drives out the state that the fourth would start from, and must have room for.
    requests = [
        make_request(0, 0, 1, range(4)),
        make_request(1, 1_000, 1, range(1_000, 1_059)),
        make_request(2, 2_000, 80, range(200, 203)),
        make_request(3, 2_150, 1, range(4), range(500, 561)),
    ]

    def admitted(jump: bool) -> list[float]:
        policy = make_policy(placement.Rule(lambda visit: (4,)), total_bytes=110, needs_states=True, grid=4)
        return times_ms(serve(requests, BatchRules(), policy, jump)[0][3])

    assert admitted(jump=True) == admitted(jump=False)


def test_a_preempted_request_is_observed_once_per_admission():
    """A readmission without room changes nothing that placements learn or that is stored."""

    class Counting:
        def __init__(self) -> None:
            self.prompts: list[int] = []

        def observe(self, prefill: placement.PrefillInfo) -> None:
            self.prompts.append(prefill.prompt)

        def place(self, prefill: placement.PrefillInfo) -> tuple[int, ...]:
            return (20,)

    # Coming back, the second needs 21 kept tokens, 1 to compute and the 19 it had decoded; the first holds 40 of 80.
    placer = Counting()
    requests = [make_request(i, 0, 40, range(100 * i, 100 * i + 20 + i)) for i in range(2)]
    policy = make_policy(placer, kv_bytes=80, needs_states=True)
    records, _, row = serve(requests, BatchRules(), policy, jump=False)
    assert sorted(records) == [0, 1]
    assert row.preemptions == 1
    assert placer.prompts == [20, 21, 21]

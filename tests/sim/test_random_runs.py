"""Random small runs of every kind of policy: jumping equals stepping, and no request is lost."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
import simpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spanlab.core import placement
from spanlab.core.admission import BatchRules
from spanlab.core.eviction import EVICTION_ORDERS, FUTURE
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.policies.tree_variants import PrivateIndex, PublishedStudyPolicy
from spanlab.core.request import UNLIMITED, Budget, Request, Span
from spanlab.core.rules import CacheRules, Progress, Replay, ReuseRules
from spanlab.core.scheduler import Scheduler
from spanlab.core.step import ScheduledSequence, ScheduledStep, StepFeatures, StepResult, features
from spanlab.metrics import CacheUsage, Recorder
from spanlab.model_spec import HardwareSpec
from spanlab.records import LOSS_CAUSES, Record
from spanlab_sim.routing import Observer
from spanlab_sim.run import ModelledBackend
from spanlab_sim.server import Replica, Server, Source
from spanlab_sim.timing import ConstantTiming, RooflineTiming, TimingModel

from ..support.models import make_model
from ..support.policies import make_tree_policy
from .serving import serve

LONGEST_PROMPT, LONGEST_OUTPUT = 90, 60
KV, STATE = 2, 40  # bytes per token and per state
TICK = 500  # ns; constant steps are whole ticks, so arrivals meet step boundaries
DOCUMENTS = np.random.default_rng(0).integers(0, 1_000, (3, LONGEST_PROMPT), dtype=np.int32)
MODEL = make_model()
DEVICE = HardwareSpec("toy", 1e9, 1e9, 1.0, 1.0, 1.0, host_s=3e-6)
DEVICES = {"roofline": DEVICE, "bound_by_bytes": replace(DEVICE, peak_flops=1e15)}
TIMINGS: dict[str, TimingModel] = {
    "constant": ConstantTiming(1 * TICK * 1e-9, 4 * TICK * 1e-9, 2 * TICK * 1e-9),
    "free_decodes": ConstantTiming(1 * TICK * 1e-9, 0.0, 0.0),
    **{name: RooflineTiming(MODEL, device) for name, device in DEVICES.items()},
}


FACTS = placement.ArmFacts(grid=4, unit=4, warmup=2, max_tokens=LONGEST_PROMPT)


def learned(update="periodic", **options) -> placement.DynamicProgram:
    return placement.DynamicProgram(3, placement.Dp(update, every=3, **options), facts=FACTS)


PLACERS: dict[str, Callable[[], placement.Placer]] = {
    "no_states": placement.no_states,
    "block": lambda: placement.every_n(8),
    "balanced": lambda: placement.balanced(3),
    "sqrt": placement.square_root,
    "log": lambda: placement.powers_of_two(8),
    "last": placement.last,
    "boundary": placement.boundary,
    "branch": placement.branch,
    "dp": learned,
    "dp_fixed": lambda: learned("decayed", backtrack="fixed", observe="matched", decay=0.9, solver="published"),
    "tail": lambda: placement.tail(3, facts=FACTS),
    "branch_and_last": lambda: placement.Union((placement.branch(), placement.last())),
    "retention": lambda: placement.retention(8, facts=FACTS),
    "second_hit": lambda: placement.second_hit(8),
}
REPLAYS = [None, None, Replay(True, 2, 1, 1), Replay(False, 3, 8, 2, most_tokens=9)]
PROGRESS = [None, None, Progress(chunk=4), Progress(newest=4), Progress(interval=8), Progress(4, 12, 8)]


@dataclass(frozen=True)
class Scenario:
    requests: tuple[Request, ...]
    rules: BatchRules
    reuse: ReuseRules
    budget: Budget
    timing: str = "constant"
    placer: str = "no_states"
    block_size: int = 1
    fixed_blocks: bool = False
    eviction: str = "lru"
    private: bool = False

    def policy(self) -> TreePolicy:
        private = {"kind": PublishedStudyPolicy, "index": PrivateIndex} if self.private else {}
        return make_tree_policy(
            self.reuse,
            budget=self.budget,
            placer=PLACERS[self.placer](),
            kv_bytes=KV,
            state_bytes=STATE,
            block_size=self.block_size,
            fixed_blocks=self.fixed_blocks,
            eviction=self.eviction,
            **private,
        )


@dataclass
class Log:
    """Step plans with the time at which each began."""

    timing: TimingModel
    state_bytes: int
    reuse: ReuseRules
    steps: list[tuple[int, ScheduledStep, StepFeatures]] = field(default_factory=list)

    def on_step(self, step: ScheduledStep, now: int, result: StepResult) -> None:
        self.steps.append((now, step, features(step, self.state_bytes, self.reuse)))

    def expanded(self) -> list[tuple[object, ...]]:
        """One row per engine step: when it begins and ends, chunks, decodes, loads."""
        rows: list[tuple[object, ...]] = []
        for start, step, counts in self.steps:
            loads = tuple(sequence.request.id for sequence in step.loads)
            chunks, decodes, repeats = step.key()
            chunks = tuple(chunk[:4] for chunk in chunks)
            for i in range(repeats):
                each = counts._replace(decode_context=counts.decode_context + i * counts.num_decodes)
                end = start + self.timing.step(each)
                rows.append((start, end, chunks, decodes, loads if i == 0 else ()))
                start = end
        return rows


def run(scenario: Scenario, jump: bool):
    policy, timing = scenario.policy(), TIMINGS[scenario.timing]
    log = Log(timing, policy.store.state_bytes, scenario.reuse)
    records, row = serve(scenario.requests, policy, timing, scenario.rules, jump=jump, on_step=log.on_step)
    return list(records.values()), row, log, policy


# -- scenarios --------------------------------------------------------------------------------------------------------


@st.composite
def prompts(draw) -> tuple[Span, ...]:
    document = DOCUMENTS[draw(st.integers(0, 2))][: draw(st.sampled_from([0, 8, 16, 33, 48, 64]))]
    tail = draw(st.integers(1, 26))
    question = np.arange(tail, dtype=np.int32) + 10_000 + 1_000 * draw(st.integers(0, 3))
    spans = (Span(document, reusable=True), Span(question))
    return spans if len(document) else spans[1:]


@st.composite
def workloads(draw) -> tuple[Request, ...]:
    count, clock, requests = draw(st.integers(1, 12)), 0, []
    for i in range(count):
        clock += TICK * draw(st.sampled_from([0, 0, 1, 2, 4, 6, 8, 10, 33, 100, 1_000]))
        output = draw(st.one_of(st.integers(1, 4), st.integers(1, LONGEST_OUTPUT)))
        requests.append(Request(i, draw(st.integers(0, 2)), draw(prompts()), output, clock))
    return tuple(requests)


def tokens(requests: tuple[Request, ...]) -> int:
    """Tokens that the largest request holds in the end: the least that a store must have room for."""
    return max(len(request.tokens) + request.output_len for request in requests)


@st.composite
def budgets(draw, requests: tuple[Request, ...], reuse: ReuseRules, entries: bool) -> Budget:
    kv, states = KV * (tokens(requests) + draw(st.integers(0, 150))), reuse.needs_states
    num_states = (
        0 if reuse.progress is None else max(reuse.progress.max_states(request.output_len) for request in requests)
    )
    state = STATE * (num_states + draw(st.integers(1, 6))) if states else 0
    kinds = {
        "none": Budget(),
        "kv": Budget(kv_bytes=kv),
        "apart": Budget(kv_bytes=kv, state_bytes=state if states else UNLIMITED),
        "total": Budget(total_bytes=kv + state),
    }
    budget = kinds[draw(st.sampled_from(sorted(kinds)))]
    return replace(budget, entries=draw(st.integers(1, 5))) if entries and draw(st.booleans()) else budget


@st.composite
def scenarios(draw, memory: bool = True) -> Scenario:
    requests = draw(workloads())
    states, private, keeps = draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 9)) > 0
    block_size = 1 if private else draw(st.sampled_from([1, 4]))
    seats = draw(st.integers(1, 6))
    reuse = ReuseRules(
        keeps,
        states,
        draw(st.sampled_from([1, 4])) if states else 1,
        draw(st.booleans()),
        cache=CacheRules(states_per_path=draw(st.sampled_from([None, None, 1, 2])) if states else None),
        progress=draw(st.sampled_from(PROGRESS)) if states and keeps and not private else None,
        replay=draw(st.sampled_from(REPLAYS)) if states and keeps and not private else None,
    )
    return Scenario(
        requests=requests,
        rules=BatchRules(
            draw(st.sampled_from([seats, seats + 3, 20, 64, 8_192])), seats, draw(st.booleans()), draw(st.booleans())
        ),
        reuse=reuse,
        private=private,
        budget=draw(budgets(requests, reuse, entries=True)) if memory else Budget(),
        timing=draw(st.sampled_from(sorted(TIMINGS))),
        placer=draw(st.sampled_from(sorted(PLACERS))) if keeps else "no_states",
        block_size=block_size,
        fixed_blocks=block_size > 1 and draw(st.booleans()),
        eviction=draw(st.sampled_from(sorted(set(EVICTION_ORDERS) - set(EVICTION_ORDERS.needing(FUTURE))))),
    )


def joined_at_a_boundary(scenario: Scenario, which: int) -> Scenario:
    """The scenario with one more request, which arrives exactly when a step of the original run ends."""
    rows = run(scenario, jump=False)[2].expanded()
    first = scenario.requests[0]
    late = Request(99, 0, first.spans, first.output_len, int(rows[which % len(rows)][1]))
    return replace(scenario, requests=tuple(sorted((*scenario.requests, late), key=lambda r: r.arrived_at)))


EXAMPLES = settings(max_examples=70, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
MANY = settings(EXAMPLES, max_examples=5_000)

# -- jumping ----------------------------------------------------------------------------------------------------------


def check_jumping(scenario: Scenario) -> None:
    jumped, jumped_row, jumps, _ = run(scenario, jump=True)
    stepped, stepped_row, steps, _ = run(scenario, jump=False)
    assert jumps.expanded() == steps.expanded()
    assert jumped == stepped
    same = ("makespan_s", "busy_s", "steps", "preemptions", "requests", "inserted_bytes", "evicted_bytes")
    resident = [f"{kind}_resident_{value}_bytes" for kind in ("kv", "state") for value in ("mean", "peak")]
    for key in (*same, *resident):
        assert getattr(jumped_row, key) == getattr(stepped_row, key), key


@EXAMPLES
@given(scenario=scenarios(), which=st.integers(0, 200))
def test_jumping_and_stepping_give_the_same_run(scenario, which):
    check_jumping(scenario)
    check_jumping(joined_at_a_boundary(scenario, which))


@pytest.mark.slow
@MANY
@given(scenario=scenarios(), which=st.integers(0, 200))
def test_jumping_and_stepping_give_the_same_run_many_times(scenario, which):
    check_jumping(scenario)
    check_jumping(joined_at_a_boundary(scenario, which))


# -- conservation -----------------------------------------------------------------------------------------------------


def audited_run(scenario: Scenario, jump: bool) -> tuple[list[Record], list[tuple[int, int]]]:
    """Serve with the parts in hand, look at all of them before every step; returns records and busy intervals."""
    policy, records, rules = scenario.policy(), [], scenario.rules
    scheduler, env, gauge = Scheduler(policy, rules), simpy.Environment(), CacheUsage([policy.store])
    recorder = Recorder()
    begun: list[tuple[int, ScheduledStep, StepFeatures]] = []

    def ran(step: ScheduledStep, now: int, result: StepResult) -> None:
        gauge.advance(0, now)
        begun.append((now, step, features(step, policy.store.state_bytes, policy.rules)))
        assert len(scheduler.running) <= rules.max_num_seqs
        sizes = [chunk.stop - chunk.start for chunk in step.chunks]
        alone = len(sizes) == 1 and not rules.enable_chunked_prefill
        assert alone or sum(sizes) + len(step.decodes) <= rules.max_num_batched_tokens
        assert not (rules.prefill_first and step.chunks and step.decodes)
        at_work = [chunk.sequence.request.id for chunk in step.chunks] + [s.request.id for s in step.decodes]
        assert len(set(at_work)) == len(at_work) > 0
        policy.check()

    def arrived(request: Request, now: int) -> Request:
        recorder.arrived(request)
        return request

    def finished(number: int, sequence: ScheduledSequence) -> None:
        records.append(recorder.record(sequence, policy, counted=True))
        policy.check()

    backend = ModelledBackend(TIMINGS[scenario.timing], policy.store.state_bytes, jump, policy.rules)
    observer = type("Noted", (Observer,), {})()
    observer.arrived, observer.ran, observer.finished = arrived, ran, finished
    replica = Replica(env, scheduler, backend, observer)
    Server(env, Source(scenario.requests), [replica]).run()
    gauge.advance(0, int(env.now))
    check_drained(scheduler, gauge, replica, records)
    timing = TIMINGS[scenario.timing]
    busy = [(now, now + int(timing.span(counts, step.repeats).sum())) for now, step, counts in begun]
    assert replica.busy_ns == sum(stop - start for start, stop in busy)
    return records, busy


def check_drained(scheduler: Scheduler, gauge: CacheUsage, replica: Replica, records: list[Record]) -> None:
    store = scheduler.policy.store
    assert scheduler.idle
    assert not scheduler.running
    in_use = (store.kv_reserved, store.state_reserved, store.kv_locked, store.state_locked)
    assert in_use == (0, 0, 0, 0)
    scheduler.policy.check()
    assert store.inserted_bytes - store.evicted_bytes == store.kv_cached + store.state_cached
    row = gauge.row(0, 0.0, len(records), 0, replica.busy_ns, replica.steps)
    assert row.kv_resident_mean_bytes <= row.kv_resident_peak_bytes
    assert row.state_resident_mean_bytes <= row.state_resident_peak_bytes


def seen_by_hand(requests: tuple[Request, ...]) -> dict[int, int]:
    """Return the longest prefix of each prompt that an earlier one, or its answer behind it, began with."""
    seen, texts = {}, list[tuple[str, np.ndarray]]()
    for request in sorted(requests, key=lambda request: request.arrived_at):
        shared = [common(request.tokens, text) for salt, text in texts if salt == request.cache_salt]
        seen[request.id] = max(shared, default=0)
        answer = request.output[: request.output_len] if request.output is not None else []
        texts.append((request.cache_salt, np.concatenate([request.tokens, answer])))
    return seen


def common(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


def check_record(record: Record, request: Request) -> None:
    assert record.prompt_tokens == len(request.tokens)
    assert record.output_tokens == request.output_len
    assert record.reused_tokens + record.computed_tokens == record.prompt_tokens
    losses = [getattr(record, f"lost_{cause}") for cause in LOSS_CAUSES]
    assert min(losses) >= 0
    assert record.reused_tokens + sum(losses) == record.prompt_tokens
    assert record.reused_tokens <= record.resumable_tokens <= record.matched_tokens <= record.seen_tokens
    assert record.seen_tokens <= record.prompt_tokens
    assert record.arrived_s <= record.admitted_s <= record.first_token_s <= record.finished_s
    assert (record.recomputed_tokens == 0) or record.preemptions


def check_conservation(scenario: Scenario, jump: bool) -> None:
    records, busy = audited_run(scenario, jump)
    by_id = {request.id: request for request in scenario.requests}
    assert sorted(record.request_id for record in records) == sorted(by_id)
    assert {record.request_id: record.seen_tokens for record in records} == seen_by_hand(scenario.requests)
    for record in records:
        check_record(record, by_id[record.request_id])
    for (_, stop), (start, _) in pairwise(busy):
        assert stop <= start
        if stop < start:  # the engine was idle: no request was present
            ns = [(by_id[r.request_id].arrived_at, round(r.finished_s * 1e9)) for r in records]
            assert all(arrived >= start or finished <= stop for arrived, finished in ns)


@EXAMPLES
@given(scenario=scenarios(), jump=st.booleans())
def test_nothing_is_lost_and_no_limit_is_passed(scenario, jump):
    check_conservation(scenario, jump)


@pytest.mark.slow
@MANY
@given(scenario=scenarios(), jump=st.booleans())
def test_nothing_is_lost_and_no_limit_is_passed_many_times(scenario, jump):
    check_conservation(scenario, jump)

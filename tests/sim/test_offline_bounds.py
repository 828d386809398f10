"""Served runs against their offline bounds: random small runs, and every arm of small studies."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spanlab.build import build_policy, build_timing, build_workload
from spanlab.cli import compose
from spanlab.core.admission import BatchRules
from spanlab.core.policies.block_pool import BlockPool, BlockRules, BlockStore
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.request import UNLIMITED, Budget, Request, Span
from spanlab.core.rules import ReuseRules, StorageRules
from spanlab.model_spec import GIB, HardwareSpec
from spanlab.offline.bound import CacheMemory, Prefill, least_ttft, offline_bound
from spanlab.offline.forest import (
    Admissions,
    Reuses,
    any_position_rules,
    build_forest,
    find_reuses,
    prefix_rules,
    service_order,
)
from spanlab.records import Record
from spanlab.study.bounds import storage_of, whole_ns
from spanlab.study.jobs import build_arrivals
from spanlab_sim.bounds import LeastPrefill, least_prefill
from spanlab_sim.run import simulate
from spanlab_sim.timing import RooflineTiming

from .test_random_runs import DEVICES, EXAMPLES, KV, MODEL, STATE, TIMINGS, Scenario, run, scenarios, tokens

TIMES = "arrived_s", "first_token_s"


def reuses_of(records: list[Record], requests, rules: StorageRules, reserved=True) -> Reuses:
    """The bounds for the order of a run; requests are in order of arrival."""
    numbers = {request.id: index for index, request in enumerate(requests)}
    ordered = sorted(records, key=lambda r: (r.admitted_s, numbers[r.request_id]))
    admissions = Admissions(
        np.array([numbers[r.request_id] for r in ordered]),
        np.array([r.admitted_s for r in ordered]),
        np.array([r.finished_s for r in ordered]),
        np.array([r.preemptions > 0 for r in ordered]),
        np.array([r.counted for r in ordered]),
    )
    return find_reuses(build_forest(requests, rules), service_order(admissions, reserved))


def check_scenario(scenario: Scenario) -> None:
    records, _, _, policy = run(scenario, jump=True)
    states = scenario.reuse.needs_states
    reuses = reuses_of(records, scenario.requests, storage_of(policy).rules())
    stored = storage_of(policy).rules()
    infinite = reuses_of(records, scenario.requests, prefix_rules(stored.last_token, stored.outputs))
    memory = CacheMemory(scenario.budget, KV, STATE if states else 0)
    bound = offline_bound(reuses, memory).tokens
    assert sum(record.reused_tokens for record in records) <= bound
    assert bound <= reuses.infinite_tokens <= infinite.infinite_tokens
    if scenario.timing in DEVICES and not scenario.reuse.last_token:
        least = least_prefill(TIMINGS[scenario.timing], MODEL, DEVICES[scenario.timing])
        check_latency(records, scenario, least, reuses, memory)


def check_latency(records: list[Record], scenario: Scenario, least: LeastPrefill, reuses: Reuses, memory) -> None:
    """TTFTs, queueing included, add up to no less than their bound, in whole nanoseconds."""
    numbers = {request.id: index for index, request in enumerate(scenario.requests)}
    ordered = sorted(records, key=lambda r: (r.admitted_s, numbers[r.request_id]))
    prompt_lengths = np.array([record.prompt_tokens for record in ordered])
    prefill = Prefill(prompt_lengths, np.ones(len(prompt_lengths), np.bool_), least.computing, least.step_ns)
    bound = least_ttft(reuses, memory, prefill).value
    columns = {name: np.array([getattr(record, name) for record in records]) for name in TIMES}
    assert isinstance(bound, int)
    assert 0 < bound <= whole_ns(columns)


@EXAMPLES
@given(
    scenario=scenarios(),
    peak_flops=st.floats(1e11, 1e14),
    host_s=st.sampled_from([0.0, 4e-10, 5e-10, 1e-9, 2.5e-9]),
    bandwidth=st.floats(1e10, 1e12),
)
def test_steps_of_few_nanoseconds_keep_their_bound(scenario, peak_flops, host_s, bandwidth):
    """Where rounding to whole nanoseconds is a large part of every step."""
    device = HardwareSpec("quick", peak_flops, bandwidth, 1.0, 1.0, 1.0, host_s=host_s)
    timing = RooflineTiming(MODEL, device)
    least = least_prefill(timing, MODEL, device)
    assume(least is not None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TIMINGS, "quick", timing)
        patch.setitem(DEVICES, "quick", device)
        check_scenario(replace(scenario, timing="quick", reuse=replace(scenario.reuse, last_token=False)))


def test_a_prompt_alone_takes_exactly_its_bound():
    for host_s, length in ((1e-6, 7), (3.3e-8, 50), (1.2345e-9, 23)):
        device = HardwareSpec("quick", 1e13, 1e18, 1.0, 1.0, 1.0, host_s=host_s)
        timing = RooflineTiming(MODEL, device)
        request = Request(0, 0, (Span(np.arange(length, dtype=np.int32)),), 1)
        scenario = Scenario((request,), BatchRules(64, 1), ReuseRules(True, False), Budget())
        records: list[Record] = []
        simulate(scenario.requests, scenario.policy(), scenario.rules, timing, records.append)
        least = least_prefill(timing, MODEL, device)
        prefill = Prefill(np.array([length]), np.ones(1, np.bool_), least.computing, least.step_ns)
        bound = least_ttft(
            reuses_of(records, [request], prefix_rules(False, False)), CacheMemory(Budget(), KV), prefill
        )
        assert bound.value == round(records[0].first_token_s * 1e9) > 1


def with_outputs(scenario: Scenario) -> Scenario:
    """The scenario with outputs that every other prompt continues, and memory for the longer prompts."""
    requests, budget = outputs_known(scenario.requests), scenario.budget
    more = KV * (tokens(requests) - tokens(scenario.requests))
    limits = {name: min(getattr(budget, name) + more, UNLIMITED) for name in ("kv_bytes", "total_bytes")}
    return replace(scenario, requests=requests, budget=replace(budget, **limits))


@EXAMPLES
@given(scenario=scenarios(), outputs=st.booleans())
def test_no_random_run_beats_its_bound(scenario, outputs):
    check_scenario(with_outputs(scenario) if outputs else scenario)


@pytest.mark.slow
@settings(EXAMPLES, max_examples=5_000)
@given(scenario=scenarios(), outputs=st.booleans())
def test_no_random_run_beats_its_bound_many_times(scenario, outputs):
    check_scenario(with_outputs(scenario) if outputs else scenario)


def outputs_known(requests: tuple[Request, ...]) -> tuple[Request, ...]:
    """The requests, each output begins as the next prompt of its group continues."""
    replaced = []
    for index, request in enumerate(requests):
        output = np.arange(request.output_len, dtype=np.int32) + 10_000
        spans = request.spans
        if index % 2:  # a later turn: an earlier prompt, its output and a word
            before = replaced[index - 1]
            word = np.full(1, 77_000 + index, np.int32)
            spans = (*before.spans, Span(before.output), Span(word))
        replaced.append(replace(request, spans=spans, output=output))
    return tuple(replaced)


def test_outputs_that_the_next_turn_repeats_count_for_trees():
    """Turns of one talk, alone and with room for all: a tree reuses every answer."""
    talk = [Request(index, 0, (Span(np.full(9, index, np.int32)),), 8, 10_000_000 * index) for index in range(4)]
    requests = outputs_known(tuple(talk))
    scenario = Scenario(requests, BatchRules(64, 1), ReuseRules(True, False), Budget(total_bytes=KV * 400))
    records, _, _, policy = run(scenario, jump=True)
    bound = offline_bound(
        reuses_of(records, requests, storage_of(policy).rules()), CacheMemory(scenario.budget, KV)
    ).tokens
    reused = sum(record.reused_tokens for record in records)
    assert (reused, bound) == (2 * (9 + 8 - 1), 2 * (9 + 8)), "the last token of an answer is never computed"


@EXAMPLES
@given(scenario=scenarios(memory=False), data=st.data())
def test_no_run_of_a_block_pool_beats_its_bound(scenario, data):
    requests = outputs_known(scenario.requests)
    kind = data.draw(st.sampled_from(["none", "align", "all"]))
    state = 0 if kind == "none" else STATE
    block_bytes = max(4 * KV, state)
    blocks = 2 * (max(r.num_tokens + r.output_len for r in requests) // 4 + 4)
    blocks += data.draw(st.integers(0, 40))
    store = BlockStore(BlockPool(blocks - 1), block_bytes, state)
    policy, records = BlockPolicy(BlockRules(4, kind), store), []
    batch = BatchRules(data.draw(st.sampled_from([16, 64, 512])), scenario.rules.max_num_seqs)
    simulate(requests, policy, batch, TIMINGS[scenario.timing], records.append)
    storage = storage_of(policy)
    reuses = reuses_of(records, requests, storage.rules(), storage.reserved)
    budget = storage.budget(Budget(total_bytes=blocks * block_bytes))
    bound = offline_bound(reuses, CacheMemory(budget, KV, state)).tokens
    assert sum(record.reused_tokens for record in records) <= bound <= reuses.infinite_tokens


SMALL = ("output.figures=false", "load.rates_rps=[]", "load.arms=[]")
QUALITY = (
    *SMALL, "workload.documents=6", "workload.questions_per_document=6", "arms=checkpoints",
)  # fmt: skip
RAG = (
    *SMALL, "workload=rag", "workload.documents=null", "workload.questions_per_document=null",
    "workload.rag.requests=24", "workload.rag.k=3", "model=llama-3.2-1b", "arms=methods",
)  # fmt: skip
HYBRID = (*RAG[:-2], "model=tiny-hybrid", "arms=hybrid_pic")


@pytest.mark.parametrize(
    ("options", "prompts"),
    [(QUALITY, 1.5), (QUALITY, 4), (RAG, 2.5), (RAG, 6), (HYBRID, 2.5), (HYBRID, 6), (HYBRID, 60)],
)
def test_no_arm_beats_its_bound(options, prompts):
    study = compose("smoke", [*options, "arrivals.rate_rps=20"])
    requests = build_workload(study.workload, "unused").requests
    arrived = build_arrivals(study, requests, 0, 20.0)
    longest = max(request.num_tokens for request in arrived)
    model = study.model
    room = prompts * (longest + 40) * model.kv_bytes_per_token + 3 * model.state_bytes
    study.store.total_gib, study.store.kv_gib = room / GIB, None
    budget = study.store.budget
    for name, arm in study.arms.items():
        policy, records = build_policy(study, arm, 0, longest), []
        timing, batch = build_timing(study), study.batch
        simulate(arrived, policy, batch, timing, records.append)
        storage = storage_of(policy)
        memory = CacheMemory(budget, model.kv_bytes_per_token, storage.least_state(model.state_bytes))
        bound = offline_bound(reuses_of(records, arrived, storage.rules()), memory).tokens
        kind = prefix_rules if arm.spans is None else any_position_rules
        infinite = reuses_of(records, arrived, kind(False)).infinite_tokens
        assert sum(record.reused_tokens for record in records) <= bound <= infinite, name

"""One trace, two backends: simulator and engine make the same plans at the same times, and leave the same records."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from spanlab.build import build_passages, build_span_reads
from spanlab.core.admission import BatchRules
from spanlab.core.protocol import PassageRules
from spanlab.core.repair import PREFIXES_ALONE
from spanlab.core.request import Request
from spanlab.core.step import features
from spanlab.engine.engine import Engine
from spanlab.engine.load import pool_pages
from spanlab.engine.model import SpanModel
from spanlab.engine.pages import PagePool, PoolShape
from spanlab.records import RunRow
from spanlab.settings import Strategy
from spanlab_sim.run import serve, simulate
from spanlab_sim.timing import ConstantTiming, RooflineTiming

from ..support.products import in_turn
from .factories import (
    Paced,
    arm,
    checkpoint,
    document,
    hybrid_pic,
    least_budget,
    make_hybrid,
    make_maps,
    make_policy,
    make_request,
    make_small,
    make_states,
    study_of,
    text,
)

PLACING = ("none", "block_64", "balanced_3", "sqrt", "dp_3_branch", "boundary", "radix_branch_last", "block_hash_align")
HYBRID = {f"hybrid, {name}": checkpoint(name, block_size=64) for name in PLACING}
SPANS = {
    "hybrid spans": hybrid_pic(block_size=1, placement="block_64"),
    "hybrid spans in pages": hybrid_pic("low_rank", block_size=16, rank=2, placement="boundary"),
}
CACHED = PassageRules(order="cached")
ORDERED = {
    "cached order": replace(arm("radix"), passages=CACHED),
    "cached order, lego_link_16": replace(arm("lego_link_16"), passages=CACHED),
    "cached order, kept repairs": replace(arm("lego_link_16"), passages=CACHED, policy="kept_repairs"),
    "second touch, pic": replace(arm("pic"), policy="second_touch"),
}
ARMS = {name: arm(name) for name in study_of(make_small()).arms} | HYBRID | SPANS | ORDERED
RULES = {
    "chunked": BatchRules(max_num_batched_tokens=40, max_num_seqs=4),
    "whole prompts": BatchRules(max_num_batched_tokens=60, max_num_seqs=3, enable_chunked_prefill=False),
    "prefill first": BatchRules(max_num_batched_tokens=40, max_num_seqs=4, prefill_first=True),
}


LENGTHS = (20, 5, 33, 17, 30)


def trace(count: int = 12, gap_ns: float = 4e6, seed: int = 3, longest: int = 24) -> list[Request]:
    """Poisson arrivals of prompts with shuffled documents, some asked again, two tenants, text between documents."""
    rng = np.random.default_rng(seed)
    times = np.rint(rng.exponential(gap_ns, count).cumsum()).astype(int).tolist()
    requests = []
    for rank, at in enumerate(times):
        order = rng.choice(5, rng.integers(1, 4), replace=rank % 3 == 0)
        spans = [text(90, 11), *(document(int(name), LENGTHS[name]) for name in order)]
        if rank % 4 == 1:
            spans.insert(2, text(91, 6))
        spans.append(text(100 + rank % 5, 7))
        cache_salt = "other" if rank % 5 == 4 else ""
        requests.append(
            make_request(rank, *spans, output=int(rng.integers(1, longest + 1)), at=at, cache_salt=cache_salt)
        )
    same = requests[-2:]  # two arrive at one moment
    return [*requests[:-2], *(replace(request, arrived_at=same[0].arrived_at) for request in same)]


def hybrid_trace() -> list[Request]:
    """The like with a long document before, so that states have somewhere to stand.

    The first prompt is long and soon done: where it alone has room, several others begin and grow out of it.
    """
    first, *rest = trace(9, 1e6, seed=13, longest=19)
    every = (first.spans[0], *(document(name, length) for name, length in enumerate(LENGTHS)), first.spans[-1])
    long = [replace(document(80 + at, length), reusable=True) for at, length in enumerate((130, 66, 66))]
    together = [replace(first, spans=every, output_len=1), *rest]
    return [
        replace(one, spans=(long[rank % 3], *one.spans), arrived_at=one.arrived_at // 4)
        for rank, one in enumerate(together)
    ]


def model_for(strategy: Strategy) -> SpanModel:
    """A model that the arm goes with: deviations need layers to differ in, states need a hybrid.

    Each is as shallow as its arm allows: plans contain tokens, pages and states, which are equal in every layer.
    """
    if any(strategy is one for one in (HYBRID | SPANS).values()):
        return make_hybrid(layers=2)
    repair = None if strategy.spans is None else strategy.spans.repair
    if repair is None or not repair.kind.startswith("deviation"):
        return make_small(layers=2)
    return make_small(layers=4 if repair.kind == "deviation_gradual" else 3)


@dataclass
class Backends:
    """What each backend planned and recorded, and its row."""

    plans: dict[str, list] = field(default_factory=lambda: {"sim": [], "engine": []})
    records: dict[str, list] = field(default_factory=lambda: {"sim": [], "engine": []})
    rows: dict[str, RunRow] = field(default_factory=dict)

    def agree(self) -> bool:
        return all(kind["engine"] == kind["sim"] for kind in (self.plans, self.records, self.rows))


def both(strategy: Strategy, rules: BatchRules, requests: list[Request], timing, budget: int | None) -> Backends:
    """Serve a trace with one model of time, simulated and for real."""
    model, run_result = model_for(strategy), Backends()
    options = {"seed": 4, "rate_rps": 2.5, "warmup": 3}

    def note(backend: str):
        return lambda step, now, result: run_result.plans[backend].append((now, step.key()))

    policy, write = make_policy(model, strategy, budget), run_result.records["sim"].append
    reads = build_span_reads(strategy)
    options |= {"group": requests[0].group_id, "passages": build_passages(strategy)}
    sim = {"jump": False, "reads": reads, "on_step": note("sim")}
    run_result.rows["sim"] = simulate(requests, policy, rules, timing, write, **sim, **options)

    policy, write = make_policy(model, strategy, budget), run_result.records["engine"].append
    pages = pool_pages(policy, rules, requests, model.context)
    shape = PoolShape(model.layers, pages, strategy.block_size, model.kv_heads, model.head_dim)
    pool = PagePool(shape, model.dtype, "cpu", poison=True)
    states = make_states(model)
    held = {"states": states, "maps": make_maps(model, policy)}
    spans = strategy.spans or PREFIXES_ALONE
    engine = Engine(model, pool, policy, spans, positions=model.context, **held)
    paced = Paced(engine, lambda step: timing.step(features(step, policy.store.state_bytes, policy.rules, reads)))
    run_result.rows["engine"] = serve(requests, policy, rules, paced, write, on_step=note("engine"), **options)
    assert pool.free_pages + len(engine.nodes.all()) == pages
    assert states is None or states.used == len(engine.memory.states.all())
    return run_result


@pytest.mark.parametrize(("name", "rules", "tight"), in_turn(ARMS, RULES, (False, True)))
def test_plans_records_and_rows_are_equal(name, rules, tight):
    strategy, requests = ARMS[name], hybrid_trace() if name in HYBRID | SPANS else trace()
    model = model_for(strategy)
    study = study_of(model)
    timing = RooflineTiming(study.model, study.hardware)
    budget = least_budget(model, strategy, requests) if tight else None
    run_result = both(strategy, RULES[rules], requests, timing, budget)
    assert run_result.agree()
    records, row = run_result.records["engine"], run_result.rows["engine"]
    assert len(records) == len(requests)
    assert any(record.admitted_s > record.arrived_s for record in records)
    assert (row.preemptions > 0) == tight
    assert (sum(record.captured_states for record in records) > 0) == (strategy.placement.places)
    assert name not in SPANS or sum(record.reused_tokens for record in records) > 0


@pytest.mark.parametrize("name", ["radix", "pic"])
def test_last_tokens_that_are_computed_beside_stored_ones_have_pages(name):
    """Equal prompts of one step: the store counts their last token once, though each computes it in its own page."""
    strategy, model = arm(name), make_small(layers=2)
    requests = [make_request(rank, text(90, 30), output=2, at=0) for rank in range(3)]
    budget = least_budget(model, strategy, requests)
    assert both(strategy, RULES["chunked"], requests, ConstantTiming(0.0, seconds_per_step=1e-3), budget).agree()


@pytest.mark.parametrize("name", ["none", "radix", "pic", "cache_blend_15"])
def test_both_backends_admit_an_arrival_at_a_step_end(name):
    millisecond = 10**6
    requests = [replace(request, arrived_at=rank * 7 * millisecond) for rank, request in enumerate(trace())]
    run_result = both(arm(name), RULES["chunked"], requests, ConstantTiming(0.0, seconds_per_step=1e-3), None)
    assert run_result.agree()
    ends = {now for now, _ in run_result.plans["engine"]}
    assert any(request.arrived_at in ends for request in requests[1:])

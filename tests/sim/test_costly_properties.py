"""Known errors of other simulators: hits that cost work, and preemptions that gain throughput."""

from collections.abc import Callable

import numpy as np
import pytest

from spanlab.core import placement
from spanlab.core.request import UNLIMITED, Budget, Request, Span
from spanlab.core.rules import ReuseRules
from spanlab.records import Record
from spanlab_sim.timing import ConstantTiming

from ..support.policies import make_tree_policy
from . import serving
from .serving import SECOND

PER_TOKEN_S = 0.001
SEEDS = range(12)
FACTS = placement.ArmFacts(grid=4, unit=4, warmup=0, max_tokens=80)
PLACERS: dict[str, Callable[[], placement.Placer]] = {
    "dense": lambda: placement.every_n(4),
    "last": placement.last,
    "tail": lambda: placement.tail(2, facts=FACTS),
    "branch": placement.branch,
    "dp": lambda: placement.DynamicProgram(2, placement.Dp(every=3, decay=0.9), facts=FACTS),
}


def draw_requests(seed: int, number: int, gap_s: float, output: int = 3) -> list[Request]:
    """Questions about a few documents, `gap_s` seconds apart."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, 50, int(rng.integers(10, 40)), dtype=np.int32) for _ in range(4)]
    requests = []
    for i in range(number):
        question = rng.integers(50, 99, int(rng.integers(1, 12)), dtype=np.int32)
        tokens = np.concatenate([documents[int(rng.integers(0, 4))], question])
        requests.append(Request(i, 0, (Span(tokens),), output, round(i * gap_s * SECOND)))
    return requests


def serve(requests, rules: ReuseRules, placer=None, budget=UNLIMITED, step_s=0.0) -> tuple[list[Record], float]:
    """Records in order of request, and the seconds that all steps took; KV takes 1 byte a token, a state 10."""
    policy = make_tree_policy(rules, budget=Budget(total_bytes=budget), placer=placer)
    records, row = serving.serve(requests, policy, ConstantTiming(PER_TOKEN_S, step_s))
    return [records[request.id] for request in requests], row.busy_s


def reused(records: list[Record]) -> int:
    return sum(record.reused_tokens for record in records)


def computed(records: list[Record]) -> int:
    return sum(record.computed_tokens for record in records)


@pytest.mark.parametrize("seed", SEEDS)
def test_more_hits_never_mean_more_computed_work(seed):
    requests = draw_requests(seed, number=20, gap_s=1.0)
    rules = ReuseRules(needs_states=True, grid=4)
    served = [serve(requests, rules, make(), budget) for make in PLACERS.values() for budget in (150, 400, UNLIMITED)]
    by_hits = sorted(served, key=lambda run: reused(run[0]))
    work = [computed(records) for records, _ in by_hits]
    assert work == sorted(work, reverse=True)
    busy = [busy_s for _, busy_s in by_hits]
    assert busy == pytest.approx(sorted(busy, reverse=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_unlimited_memory_never_computes_more_than_a_budget(seed):
    requests = draw_requests(seed, number=20, gap_s=1.0)
    unlimited, _ = serve(requests, ReuseRules())
    for budget in (60, 90, 150, 300):
        limited, _ = serve(requests, ReuseRules(), budget=budget)
        assert all(a.reused_tokens >= b.reused_tokens for a, b in zip(unlimited, limited, strict=True))


@pytest.mark.parametrize("step_s", [0.0, 0.004])
@pytest.mark.parametrize("seed", SEEDS)
def test_preemption_never_raises_throughput(seed, step_s):
    requests = draw_requests(seed, number=12, gap_s=0.0, output=30)
    ample, free_s = serve(requests, ReuseRules(keeps=False), step_s=step_s)
    tight, pressed_s = serve(requests, ReuseRules(keeps=False), budget=170, step_s=step_s)
    assert sum(record.preemptions for record in ample) == 0
    assert sum(record.preemptions for record in tight) > 0
    assert [record.output_tokens for record in tight] == [record.output_tokens for record in ample]
    again = sum(record.recomputed_tokens for record in tight)
    assert again > 0
    assert pressed_s > free_s


@pytest.mark.parametrize("seed", SEEDS)
def test_recomputed_tokens_are_all_that_preemption_costs(seed):
    requests = draw_requests(seed, number=12, gap_s=0.0, output=30)
    _, free_s = serve(requests, ReuseRules(keeps=False))
    tight, pressed_s = serve(requests, ReuseRules(keeps=False), budget=170)
    again = sum(record.recomputed_tokens for record in tight)
    assert pressed_s == pytest.approx(free_s + again * PER_TOKEN_S)

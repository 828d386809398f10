"""Stored repairs: tokens that are repaired again, and bytes of stored repairs."""

from itertools import pairwise

import numpy as np
import pytest

from spanlab.build import build_policy
from spanlab.cli import compose
from spanlab.core.admission import BatchRules
from spanlab.core.policies.tree_variants import KeptRepairsPolicy
from spanlab.core.protocol import by_cache
from spanlab.core.repair import Repair
from spanlab.core.request import Budget, Request
from spanlab.core.rules import ReuseRules
from spanlab.core.tree import isolated
from spanlab_sim.run import simulate
from spanlab_sim.timing import ConstantTiming

from ..support.policies import make_tree_policy
from . import factories
from .factories import KV, assert_drained, assert_within_budget, doc, make_budget, make_prompt, text
from .steps import serve_waves

HEAD, LENGTHS = text(*range(5)), (3, 8, 9, 12, 20)
DOCUMENTS = [doc(*range(100 * number, 100 * number + length)) for number, length in enumerate(LENGTHS, 1)]


def make_policy(budget: Budget | None = None, *, k: int = 4, block_size: int = 1, **store) -> KeptRepairsPolicy:
    rules = ReuseRules(layout=isolated, repair=Repair("first", k=k))
    return make_tree_policy(rules, kind=KeptRepairsPolicy, budget=budget, kv_bytes=KV, block_size=block_size, **store)


def prompt(*order: int, id: int = 0, arrived_at: int = 0, output: int = 1, head: bool = True) -> Request:
    spans = [HEAD] * head + [DOCUMENTS[number] for number in order]
    request = make_prompt(*spans, text(1000 + id, 7), id=id, output=output)
    return Request(request.id, 0, request.spans, output_len=output, arrived_at=arrived_at)


def served(policy, *requests: Request) -> list[int]:
    """Serve requests one after another; return the repaired tokens of each."""
    sequences = serve_waves(policy, [[request] for request in requests], BatchRules(max_num_batched_tokens=9))
    return [sequence.first_plan.repaired for sequence in sequences.values()]


def test_kept_repairs_weigh_their_blocks():
    for block_size, tokens in ((1, 4), (3, 6)):
        policy = make_policy(block_size=block_size)
        plain = factories.make_policy(block_size=block_size, layout=isolated, repair=Repair("first", k=4))
        for tested in (policy, plain):
            served(tested, prompt(1, 2, 3), prompt(2, 1, 3, id=1))
        assert policy.store.kv_cached - plain.store.kv_cached == 6 * tokens * KV


def test_span_at_the_start_needs_none():
    assert served(make_policy(), prompt(1, 2, head=False), prompt(1, 2, head=False, id=1)) == [4, 0]


@pytest.mark.parametrize("block_size", [1, 2])
def test_repaired_tokens_equal_brute_force(block_size: int):
    for seed in range(15):
        draw = np.random.default_rng(seed)
        orders = [tuple(draw.permutation(5)[: draw.integers(1, 5)].tolist()) for _ in range(12)]
        requests = [prompt(*order, id=number) for number, order in enumerate(orders)]
        stored: set[tuple[int, ...]] = set()
        expected = []
        for order in orders:
            prefixes = [order[: count + 1] for count in range(len(order))]
            expected.append(sum(min(4, LENGTHS[prefix[-1]]) for prefix in prefixes if prefix not in stored))
            stored |= {prefix for prefix in prefixes if LENGTHS[prefix[-1]] >= 4}
        assert served(make_policy(block_size=block_size), *requests) == expected


@pytest.mark.parametrize("eviction", ["lru", "fifo", "lfu"])
@pytest.mark.parametrize(
    ("block_size", "tokens", "entries"), [(1, 130, None), (2, 140, None), (1, None, 7), (3, 200, 9)]
)
def test_crowded_stores_add_up(eviction: str, block_size: int, tokens: int | None, entries: int | None):
    """Serve several requests at once, with preemptions and evictions."""
    for seed in range(3):
        draw = np.random.default_rng(seed)
        policy = make_policy(make_budget(tokens=tokens, entries=entries), block_size=block_size, eviction=eviction)
        requests = [
            prompt(
                *draw.permutation(5)[:3].tolist(), id=id, arrived_at=id // 3 * 1000, output=int(draw.integers(1, 30))
            )
            for id in range(40)
        ]
        records: list = []

        def on_step(step, now, result, policy=policy):
            policy.check()
            assert_within_budget(policy.store)

        rules = BatchRules(max_num_batched_tokens=25, max_num_seqs=4)
        simulate(requests, policy, rules, ConstantTiming(1e-6), records.append, on_step=on_step)
        assert len(records) == 40
        assert_drained(policy)
        repaired = [record.repaired_tokens for record in records]
        assert min(repaired) < max(repaired)


def test_cached_order_follows_kept_repairs():
    policy = make_policy()
    served(policy, prompt(3, 1, 2))
    assert by_cache(prompt(1, 2, 3, id=1), policy, 9) == [2, 0, 1]
    assert by_cache(prompt(1, 2, 4, id=1), policy, 9) == [0, 1, 2]


def test_plan_says_what_is_not_repaired():
    policy = make_policy()
    served(policy, prompt(1, 2, 3))
    plan = policy.match(prompt(1, 2, 4, id=1), 9)
    assert plan.repaired == 4
    assert plan.losses.repair == 0  # document 4 is new, and the repairs of the others are stored
    assert plan.reused == len(HEAD.tokens) + LENGTHS[1] + LENGTHS[2]
    assert plan.reused + sum(plan.losses) == plan.prompt
    assert plan.without_reuse().repaired == 12
    assert all(before.stop <= after.start for before, after in pairwise(plan.without_reuse().spans))


@pytest.mark.parametrize("arm", ["pic", "cache_blend_15", "radix"])
def test_other_methods_keep_no_repairs(arm: str):
    study = compose("pic_sim", [f"arms.{arm}.policy=kept_repairs"])
    with pytest.raises(
        ValueError, match=r"^policy=kept_repairs with spans\.repair\.kind=.*: expected a repair of first"
    ):
        build_policy(study, study.arms[arm], 0, 1)

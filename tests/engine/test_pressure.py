"""Tight memory: with every arm, preempted, evicted and chunked requests have the exact outputs."""

import pytest

from spanlab.core.admission import BatchRules

from ..support.products import in_turn
from .factories import arm, least_budget, make_small, nothing_leaks, questions
from .oracles import run_checked, wrong

ORDERS = [(0, 1), (1, 2), (2, 0), (1, 0), (3, 2, 4), (2, 1, 0)]
LENGTHS = (20, 5, 33, 17, 30)
TIGHT, ROOMY = (BatchRules(max_num_batched_tokens=tokens, max_num_seqs=4) for tokens in (24, 48))
ARMS = (  # in turn with pages of 1 and 16 tokens
    "none", "block_hash_16", "radix", "pic_raw", "pic", "pic_turned", "lego_link_16", "last_16", "cache_blend_15",
    "strided_15", "ape", "cache_blend_gradual_15",
)  # fmt: skip
PAGED = pytest.mark.parametrize(("name", "block_size"), in_turn(ARMS, (1, 16)))


def layers_for(strategy) -> int:
    """Deviations need layers to differ in, and gradual filtering layers to filter in."""
    kind = "none" if strategy.spans is None else strategy.spans.repair.kind
    return {"deviation": 3, "deviation_gradual": 5}.get(kind, 2)


@PAGED
def test_preempted_evicted_and_chunked(name, block_size):
    strategy, requests = arm(name, block_size), questions(ORDERS, LENGTHS, output=24, at=0)
    model = make_small(layers=layers_for(strategy))
    budget = least_budget(model, strategy, requests)
    result = run_checked(model, strategy, requests, rules=TIGHT, budget=budget)
    assert result.rows[0].preemptions > 0
    assert result.rows[0].evicted_bytes > 0 or not strategy.keep


@PAGED
def test_roomy_packed_and_warm(name, block_size):
    strategy, requests = arm(name, block_size), questions(ORDERS, LENGTHS, output=2, at=10**6)
    result = run_checked(make_small(layers=layers_for(strategy)), strategy, requests, rules=ROOMY).serve(requests)
    assert wrong(result, strategy, *requests) < 1e-4
    assert nothing_leaks(result)
    reused = sum(record.reused_tokens for record in result.records.values())
    assert (reused > 0) == strategy.keep

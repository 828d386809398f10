"""Tight memory: with every arm, preempted, evicted and chunked requests have the exact outputs."""

from __future__ import annotations

import pytest

from spanlab.core.admission import BatchRules

from .factories import arm, make_policy, make_small, nothing_leaks, questions
from .oracles import run_checked, wrong

ORDERS = [(0, 1), (1, 2), (2, 0), (1, 0), (3, 2, 4), (2, 1, 0)]
LENGTHS = (20, 5, 33, 17, 30)
TIGHT, ROOMY = (BatchRules(max_num_batched_tokens=tokens, max_num_seqs=4) for tokens in (24, 48))
ARMS = {
    "none": arm("none"),
    "radix": arm("radix"),
    "radix, 16": arm("radix", 16),
    "block hash, 16": arm("block_hash_16"),
    "pic rotate_keys": arm("pic_raw"),
    "pic rotate_queries": arm("pic"),
    "pic pre_rotated": arm("pic_turned"),
    "pic rotate_keys, 16": arm("pic_raw", 16),
    "pic rotate_queries, 16": arm("pic", 16),
    "pic pre_rotated, 16": arm("pic_turned", 16),
    "LegoLink": arm("lego_link_16"),
    "LegoLink, 16": arm("lego_link_16", 16),
    "last": arm("last_16", 16),
    "strided": arm("strided_15", 16),
    "CacheBlend": arm("cache_blend_15"),
    "CacheBlend, 16": arm("cache_blend_15", 16),
    "CacheBlend gradual": arm("cache_blend_gradual_15", 16),
    "APE": arm("ape"),
    "APE, 16": arm("ape", 16),
}


def layers_for(strategy) -> int:
    """Gradual filtering needs layers to filter in."""
    return 5 if strategy.spans is not None and strategy.spans.repair.kind == "deviation_gradual" else 3


@pytest.mark.parametrize("strategy", ARMS.values(), ids=ARMS)
def test_preempted_evicted_and_chunked(strategy):
    requests = questions(ORDERS, LENGTHS, output=24, at=0)
    model = make_small(layers=layers_for(strategy))
    budget = max(make_policy(model, strategy).need(request).tokens for request in requests)
    result = run_checked(model, strategy, requests, rules=TIGHT, budget=budget)
    assert result.rows[0].preemptions > 0
    assert result.rows[0].evicted_bytes > 0 or not strategy.keep


@pytest.mark.parametrize("strategy", ARMS.values(), ids=ARMS)
def test_roomy_packed_and_warm(strategy):
    requests = questions(ORDERS, LENGTHS, output=2, at=10**6)
    result = run_checked(make_small(layers=layers_for(strategy)), strategy, requests, rules=ROOMY).serve(requests)
    assert wrong(result, strategy, *requests) < 1e-4
    assert nothing_leaks(result)
    reused = sum(record.reused_tokens for record in result.records.values())
    assert (reused > 0) == strategy.keep

"""Kept repairs on the engine: the logits of new repairs, in the counted pages."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch

from spanlab.core.admission import BatchRules

from ..support.products import every_pair
from .factories import arm, make_small, nothing_leaks, questions, start

LENGTHS = (20, 9, 33, 3)
ORDERS = [(0, 1, 2), (0, 1, 2), (0, 1, 3), (2, 1, 0), (0, 2, 1), (2, 1, 0), (0, 0, 1), (0, 0, 1)]


def methods(block_size: int, **spans):
    """LegoLink as it is, and with repairs that are kept."""
    plain = arm("lego_link_16", block_size, {"kind": "first", "k": 6}, **spans)
    return plain, replace(plain, policy="kept_repairs")


@pytest.mark.parametrize(
    ("block_size", "spans", "at"), every_pair((1, 4), ({}, {"keys": "raw", "kernel": "rotate_keys"}), (None, 0))
)
def test_kept_repairs_change_no_logit(block_size: int, spans: dict, at: int | None):
    requests = questions(ORDERS, LENGTHS, output=3, at=at)
    rules = BatchRules(max_num_batched_tokens=24, max_num_seqs=3)
    plain, kept = (
        start(make_small(layers=2), one, requests, rules=rules).serve(requests) for one in methods(block_size, **spans)
    )
    for request in requests:
        torch.testing.assert_close(kept.of(request), plain.of(request), rtol=1e-5, atol=1e-5)
    assert nothing_leaks(kept)
    repaired = [sum(one.records[request.id].repaired_tokens for request in requests) for one in (plain, kept)]
    assert repaired[1] < repaired[0]


@pytest.mark.parametrize("block_size", [1, 4])
def test_kept_repairs_survive_a_tight_store(block_size: int):
    """Spans are evicted and their repairs are not, and the other way round."""
    requests = questions([ORDERS[at % len(ORDERS)] for at in range(16)], LENGTHS, output=4, at=0)
    plain, kept = (
        start(
            make_small(layers=2), one, requests, budget=230, rules=BatchRules(max_num_batched_tokens=40, max_num_seqs=4)
        )
        for one in methods(block_size)
    )
    for request in requests:
        torch.testing.assert_close(
            kept.serve([request]).of(request), plain.serve([request]).of(request), rtol=1e-5, atol=1e-5
        )
    again = [replace(request, arrived_at=0) for request in requests]
    assert nothing_leaks(kept.serve(again))
    assert kept.engine.policy.store.evicted_bytes > 0


def test_an_unlimited_store_has_pages_for_every_repair():
    """Every order of the spans is a separate prefix with separate repairs."""
    requests = questions(list(permutations(range(4))), LENGTHS, output=2)
    _, kept = methods(1)
    served = start(make_small(layers=2), kept, requests, rules=BatchRules(max_num_batched_tokens=64, max_num_seqs=1))
    assert nothing_leaks(served.serve(requests))

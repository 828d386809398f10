"""The main invariants once more on trained weights, whose attention is anything but random."""

from __future__ import annotations

import pytest

from .factories import arm, permutations, questions, run
from .oracles import dense, divergence, error, far, wrong

LENGTHS = (20, 7, 33)


def asked(orders=None, output: int = 4):
    """Three documents in any order; ids below 105, which both models have."""
    requests = questions(orders or permutations(3), LENGTHS, output=output)
    for request in requests:
        for span in request.spans:
            assert span.tokens.max() < 105
    return requests


@pytest.fixture(autouse=True)
def small_vocabulary(monkeypatch):
    """Token ids in the vocabulary of every model here."""
    from . import factories

    original = factories.random_tokens
    monkeypatch.setattr(factories, "random_tokens", lambda name, length, vocab=105: original(name, length, 105))


@pytest.mark.parametrize("name", ["none", "radix"])
def test_prefix_methods_are_full_recompute(stories, babyllama, name):
    for model in (stories, babyllama):
        requests = asked(output=2)
        result = run(model, arm(name), requests)
        assert max(error(result, request, blocks=False) for request in requests) < 1e-4


@pytest.mark.parametrize("name", ["pic", "pic_raw", "pic_turned"])
def test_plain_reuse_is_the_block_mask(stories, name):
    requests = asked()
    result = run(stories, arm(name, 16), requests)
    assert max(error(result, request, blocks=True) for request in requests) < 1e-4


@pytest.mark.parametrize("name", ["lego_link_16", "random_16", "last_16", "strided_15", "cache_blend_15", "ape"])
def test_every_method_is_what_its_formula_says(stories, name):
    requests = asked([(0, 1, 2), (2, 1, 0)], output=2)
    result = run(stories, arm(name, 16), requests)
    assert max(wrong(result, arm(name), request) for request in requests) < 1e-4


@pytest.mark.parametrize(
    ("name", "repair"),
    [
        ("lego_link_16", {"kind": "first", "k": 33}),
        ("cache_blend_15", {"kind": "deviation", "ratio": 1.0}),
        ("as_seen_blend_15", {"kind": "deviation", "ratio": 1.0}),
    ],
)
def test_all_repaired_is_full_recompute(stories, babyllama, name, repair):
    for model in (stories, babyllama):
        requests = asked([(0, 1, 2), (2, 1, 0)], output=2)
        result = run(model, arm(name, repair=repair), requests)
        assert max(error(result, request, blocks=False) for request in requests) < 1e-4


def test_old_positions_are_worse_and_repair_is_better_than_plain_reuse(stories):
    requests, loss = asked(output=1), {}
    for name in ("pic", "old_positions", "lego_link_16", "cache_blend_15"):
        result = run(stories, arm(name), requests)
        divergences = [divergence(dense(stories, r, [0], blocks=False), result.of(r)) for r in requests[1:]]
        loss[name] = sum(divergences) / len(divergences)
    assert loss["old_positions"] > loss["pic"] > loss["lego_link_16"] > 0
    assert loss["pic"] > loss["cache_blend_15"]


def test_documents_in_another_order_say_the_same_with_ape(stories):
    requests = asked(output=1)
    tails = [r.spans[-1] for r in requests]
    same = [type(r)(r.id, 0, (*r.spans[:-1], tails[0]), arrived_at=r.arrived_at) for r in requests]
    result = run(stories, arm("ape"), same)
    assert max(far(result.of(request), result.of(same[0])) for request in same) < 5e-5

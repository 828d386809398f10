"""Owners of reused KV: spans as first seen, clean spans, and spans of other tenants."""

from dataclasses import replace

import pytest

from spanlab.core.policies.tree import TreePolicy

from ..support.products import in_turn
from .factories import APART, HEAD, arm, document, make_policy, make_request, make_small, questions, run, start, text
from .oracles import divergence, error, far

LENGTHS = (20, 9, 33)


@pytest.mark.parametrize("name", ["as_seen", "as_seen_blend_15"])
@pytest.mark.parametrize("block_size", [1, 16])
def test_the_first_request_is_full_recompute(block_size, name):
    request = questions([(0, 1, 2)], LENGTHS, output=3)[0]
    assert error(run(make_small(), arm(name, block_size), [request]), request, blocks=False) < 1e-4


@pytest.mark.parametrize(("kind", "block_size"), in_turn(["attention", "neighbours", "deviation"], [1, 16]))
def test_measured_attention_repairs_reused_spans(block_size, kind):
    strategy = arm("as_seen_blend_15", block_size, repair={"kind": kind, "ratio": 1.0})
    orders = [(0, 1), (2, 1, 3, 0, 4), (4, 2, 0), (3,)]
    for head in (11, 0):  # without a head, a document at the prompt's beginning has no text before it
        requests = questions(orders, (20, 35, 33, 18, 21), head=head, output=2)
        result = run(make_small(), strategy, requests)
        assert error(result, *requests, blocks=False) < 1e-4


def poisoned(name: str):
    """A document after a poison text, then without it; returns the run and the second request."""
    attack = make_request(0, text(66, 30), document(0, 40), text(5, 6))
    victim = make_request(1, text(HEAD, 12), document(0, 40), text(6, 6), at=APART)
    return run(make_small(), arm(name), [attack, victim]), victim


def test_what_stood_before_a_clean_span_cannot_reach_anybody():
    result, victim = poisoned("pic")
    assert result.records[1].reused_tokens == 40
    assert error(result, victim, blocks=True) < 1e-4


def test_text_before_a_span_as_seen_affects_its_readers():
    result, victim = poisoned("as_seen")
    assert result.records[1].reused_tokens == 40
    clean = run(make_small(), arm("as_seen"), [victim])
    assert divergence(clean.of(victim), result.of(victim)) > 0.01


def test_clean_readers_do_not_find_spans_as_seen():
    model = make_small()
    attack = make_request(0, text(66, 30), document(0, 40), text(5, 6))
    victim = make_request(1, text(66, 30), document(0, 40), text(5, 6))
    result = start(model, arm("as_seen"), [attack, victim]).serve([attack])
    clean = make_policy(model, arm("pic"))
    donor = result.engine.policy
    result.engine.policy = TreePolicy(clean.rules, donor.store, donor.index, clean.placer)  # one store for both
    result.serve([victim])
    assert result.records[1].reused_tokens == 30
    assert error(result, victim, blocks=True) < 1e-4


@pytest.mark.parametrize("name", ["radix", "pic", "lego_link_16", "cache_blend_15", "ape", "as_seen"])
def test_tenants_share_nothing(name):
    first = questions([(0, 1, 2)], LENGTHS)[0]
    requests = [
        replace(first, id=i, cache_salt=cache_salt, arrived_at=i * APART)
        for i, cache_salt in enumerate(("", "a", "b", "a"))
    ]
    result = run(make_small(), arm(name), requests)
    assert [result.records[i].matched_tokens for i in range(3)] == [0, 0, 0]
    assert result.records[3].matched_tokens > 11
    assert max(far(result.of(request), result.of(requests[0])) for request in requests[:3]) < 1e-4

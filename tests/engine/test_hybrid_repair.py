"""Spans of hybrids whose first tokens are computed again: in full view in both kinds of layers, then a map follows."""

from __future__ import annotations

import pytest
import torch

from spanlab.core.batch_rules import BatchRules
from spanlab.core.request import Request
from spanlab.engine.span_actions import BeginBehindRepair

from . import composed as oracle
from .composed import composed
from .factories import (
    APART,
    HEAD,
    QUESTION,
    Run,
    ask,
    beginnings,
    document,
    hybrid_pic,
    make_policy,
    make_slow_hybrid,
    nothing_leaks,
    questions,
    run,
    text,
)

CHUNKED = BatchRules(max_num_batched_tokens=13, max_num_seqs=4)
FORMS = {"exact": oracle.exact, "scalar": oracle.scalar, "sum": oracle.total, "last": oracle.last}


def worst(done: Run, requests: list[Request], repaired: int, form: oracle.Form = oracle.exact) -> float:
    """How far a run's logits are from those of repaired spans composed outside, as a share of the largest logit."""
    truths = [composed(done.engine.model, one, done.engine.outputs[one.id], form, repaired) for one in requests]
    pairs = zip(requests, truths, strict=True)
    return max(float((done.of(one) - truth).abs().max() / truth.abs().max()) for one, truth in pairs)


def reused(done: Run, requests: list[Request]) -> list[int]:
    return [done.records[request.id].reused_tokens for request in requests]


def mixed(output: int = 2) -> list[Request]:
    """Documents that are found before, behind and between those that are not, some first seen where a prompt begins."""

    def prompt(number: int, *spans) -> Request:
        return ask(number, *spans, text(QUESTION - number, 7), output=output, at=number * APART)

    one, two, three, four = (document(name, length) for name, length in enumerate((20, 33, 4, 17)))
    return [
        prompt(0, one, two),
        prompt(1, text(HEAD, 9), two, text(5, 6), three, one, four),
        prompt(2, four, text(6, 3), two, two, one),
        prompt(3, three, one),
    ]


@pytest.mark.parametrize(("repaired", "block_size"), [(1, 16), (3, 1), (18, 1), (18, 16)])
def test_repaired_spans_are_repaired_and_composed_outside(repaired, block_size):
    """Spans are shorter than the repair, a little longer, and end off the grid of blocks."""
    requests = mixed()
    done = run(make_slow_hybrid(), hybrid_pic(block_size=block_size, repaired=repaired), requests)
    assert worst(done, requests, repaired) < 1e-5
    assert nothing_leaks(done)
    lengths, found, begins = (20, 33, 4, 17), ((), (0, 1), (0, 1, 1, 3), (0, 2)), (None, None, 3, 2)
    stored = [length // block_size * block_size for length in lengths]
    kept = [length - min(length, repaired) for length in stored]  # but of a span that begins its prompt
    assert reused(done, requests) == [
        sum(stored[at] if at == first else kept[at] for at in own) for own, first in zip(found, begins, strict=True)
    ]


@pytest.mark.parametrize("form", ["scalar", "sum", "last"])
def test_every_form_is_of_what_follows_the_repair(form):
    requests = mixed()[:3]
    done = run(make_slow_hybrid("qwen3_next"), hybrid_pic(form, repaired=5), requests)
    assert worst(done, requests, 5, FORMS[form]) < 1e-5


def test_a_repair_in_chunks_behind_checkpoints():
    spans = text(HEAD, 70), document(0, 40), text(5, 90), document(1, 35), text(6, 90)
    requests = [
        ask(number, *spans[:stop], text(QUESTION - number, 5), output=2, at=number * APART)
        for number, stop in enumerate((5, 5, 3, 1))
    ]
    done = run(make_slow_hybrid(), hybrid_pic(block_size=1, placement="block_64", repaired=16), requests, rules=CHUNKED)
    assert worst(done, requests, 16) < 1e-5
    assert nothing_leaks(done)
    assert reused(done, requests) == [0, 64 + 24 + 64 + 19 + 64, 64 + 24 + 64, 64]


@pytest.mark.parametrize("repaired", [5, 40])
def test_maps_within_repaired_spans_are_of_what_follows_the_repair(repaired):
    """Repairs shorter than the interval between maps, and longer."""
    requests = beginnings((90, 60, 130, 75, 20, 130))
    for rules in (None, CHUNKED):
        given = {} if rules is None else {"rules": rules}
        done = run(make_slow_hybrid(), hybrid_pic(block_size=16, interval=32, repaired=repaired), requests, **given)
        assert worst(done, requests, repaired) < 1e-5
        assert nothing_leaks(done)
        assert reused(done, requests) == [max(0, found - repaired) for found in (0, 32, 80, 64, 0, 128)]


def test_repaired_spans_survive_preemption_and_eviction():
    requests = [
        ask(one.id, *one.spans, output=30) for one in questions([(0, 1, 2), (2, 0), (1, 2), (0, 1)], (8, 14, 20))
    ]
    strategy, model = hybrid_pic(repaired=6), make_slow_hybrid()
    budget = max(make_policy(model, strategy).need(request).tokens for request in requests)
    done = run(model, strategy, requests, rules=CHUNKED, budget=budget, states=8)
    assert done.rows[0].preemptions > 0
    assert done.engine.policy.store.evicted_bytes > 0
    assert worst(done, requests, 6) < 1e-5
    assert nothing_leaks(done)


def test_cold_and_warm_say_the_same_where_maps_are_rounded():
    first = mixed()[1]
    again = ask(9, *first.spans, output=2, at=APART * 9)
    done = run(make_slow_hybrid(), hybrid_pic(block_size=16, dtype="bfloat16", repaired=5), [first, again])
    assert done.records[9].reused_tokens > 0
    assert float((done.of(first) - done.of(again)).abs().max()) < 1e-4


def test_repair_of_whole_spans_is_the_full_view():
    """As many tokens as the longest span has: nothing is left that was computed alone."""
    requests = questions([(0, 1), (1, 0)], (20, 33), output=2)
    model = make_slow_hybrid()
    done = run(model, hybrid_pic(repaired=33), requests)
    full = run(model, hybrid_pic(), [_ordered(one) for one in requests])
    for one in requests:
        assert float((done.of(one) - full.of(one)).abs().max() / full.of(one).abs().max()) < 1e-5


def _ordered(request: Request) -> Request:
    """The same prompt as text."""
    spans = [type(span)(span.tokens) for span in request.spans]
    return ask(request.id, *spans, output=request.output_len, at=request.arrived_at)


def test_a_map_that_includes_the_repaired_tokens_is_noticed(monkeypatch):
    """The tests above would fail if repaired tokens were counted twice: their map is not folded in again."""
    monkeypatch.setattr(BeginBehindRepair, "run", lambda *given: None)
    requests = mixed()[:1]
    done = run(make_slow_hybrid(), hybrid_pic(repaired=5), requests)
    assert worst(done, requests, 5) > 1e-3


def test_a_stored_map_weighs_its_second_state():
    done = run(make_slow_hybrid(), hybrid_pic("scalar", repaired=5), [questions([(0, 1)], (20, 33))[0]])
    stored = done.engine.memory.maps.maps.stored
    assert done.engine.policy.store.state_cached == 2 * stored.slot_bytes
    alone, rest = (stored.part(name, slice(None), 0) for name in ("alone", "written"))
    assert alone.shape == rest.shape
    assert not torch.equal(alone, rest)

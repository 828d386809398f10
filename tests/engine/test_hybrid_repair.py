"""Spans of hybrids with recomputed first tokens: in full view in both kinds of layers, followed by a map."""

import pytest
import torch

from spanlab.core.admission import BatchRules
from spanlab.core.request import Request
from spanlab.engine.states import BeginAfterRepair

from .composed import FORMS, worst
from .factories import (
    APART,
    HEAD,
    QUESTION,
    beginnings,
    document,
    hybrid_pic,
    least_budget,
    make_request,
    make_slow_hybrid,
    nothing_leaks,
    questions,
    run,
    text,
)
from .oracles import apart, far

CHUNKED = BatchRules(max_num_batched_tokens=13, max_num_seqs=4)


def mixed(output: int = 2) -> list[Request]:
    """Reused documents before, after and between new ones, some first seen at a prompt's beginning."""

    def prompt(number: int, *spans) -> Request:
        return make_request(number, *spans, text(QUESTION - number, 7), output=output, at=number * APART)

    first, second, third, fourth = (document(name, length) for name, length in enumerate((20, 33, 4, 17)))
    return [
        prompt(0, first, second),
        prompt(1, text(HEAD, 9), second, text(5, 6), third, first, fourth),
        prompt(2, fourth, text(6, 3), second, second, first),
        prompt(3, third, first),
    ]


@pytest.mark.parametrize(("repaired", "block_size"), [(1, 16), (3, 1), (18, 1), (18, 16)])
def test_repaired_spans_are_repaired_and_composed_outside(repaired, block_size):
    """Spans are shorter than the repair, a little longer, and end off the grid of blocks."""
    requests = mixed()
    result = run(make_slow_hybrid(), hybrid_pic(block_size=block_size, repaired=repaired), requests)
    assert worst(result, requests, repaired=repaired) < 1e-5
    assert nothing_leaks(result)
    lengths, found, begins = (20, 33, 4, 17), ((), (0, 1), (0, 1, 1, 3), (0, 2)), (None, None, 3, 2)
    stored = [length // block_size * block_size for length in lengths]
    kept = [length - min(length, repaired) for length in stored]  # but of a span that begins its prompt
    assert result.reused(requests) == [
        sum(stored[at] if at == first else kept[at] for at in own) for own, first in zip(found, begins, strict=True)
    ]


@pytest.mark.parametrize("form", ["scalar", "sum", "last"])
def test_every_map_form_starts_after_the_repair(form):
    requests = mixed()[:3]
    result = run(make_slow_hybrid("qwen3_next"), hybrid_pic(form, repaired=5), requests)
    assert worst(result, requests, FORMS[form], 5) < 1e-5


def test_a_repair_in_chunks_behind_checkpoints():
    spans = text(HEAD, 70), document(0, 40), text(5, 90), document(1, 35), text(6, 90)
    requests = [
        make_request(number, *spans[:stop], text(QUESTION - number, 5), output=2, at=number * APART)
        for number, stop in enumerate((5, 5, 3, 1))
    ]
    result = run(
        make_slow_hybrid(), hybrid_pic(block_size=1, placement="block_64", repaired=16), requests, rules=CHUNKED
    )
    assert worst(result, requests, repaired=16) < 1e-5
    assert nothing_leaks(result)
    assert result.reused(requests) == [0, 64 + 24 + 64 + 19 + 64, 64 + 24 + 64, 64]


@pytest.mark.parametrize("repaired", [5, 40])
def test_maps_within_repaired_spans_start_after_the_repair(repaired):
    """Repairs shorter than the interval between maps, and longer."""
    requests = beginnings((90, 60, 130, 75, 20, 130))
    for rules in (None, CHUNKED):
        result = run(make_slow_hybrid(), hybrid_pic("exact", 16, interval=32, repaired=repaired), requests, rules=rules)
        assert worst(result, requests, repaired=repaired) < 1e-5
        assert nothing_leaks(result)
        assert result.reused(requests) == [max(0, found - repaired) for found in (0, 32, 80, 64, 0, 128)]


def test_repaired_spans_survive_preemption_and_eviction():
    requests = questions([(0, 1, 2), (2, 0), (1, 2), (0, 1)], (8, 14, 20), output=30, at=0)
    strategy, model = hybrid_pic(repaired=6), make_slow_hybrid()
    budget = least_budget(model, strategy, requests)
    result = run(model, strategy, requests, rules=CHUNKED, budget=budget, states=8)
    assert result.rows[0].preemptions > 0
    assert result.engine.policy.store.evicted_bytes > 0
    assert worst(result, requests, repaired=6) < 1e-5
    assert nothing_leaks(result)


def test_cold_and_warm_say_the_same_where_maps_are_rounded():
    first = mixed()[1]
    again = make_request(9, *first.spans, output=2, at=APART * 9)
    result = run(make_slow_hybrid(), hybrid_pic(block_size=16, dtype="bfloat16", repaired=5), [first, again])
    assert result.records[9].reused_tokens > 0
    assert far(result.of(again), result.of(first)) < 1e-4


def test_repair_of_whole_spans_is_the_full_view():
    """As many tokens as the longest span has: nothing is left that was computed alone."""
    requests = questions([(0, 1), (1, 0)], (20, 33), output=2)
    model = make_slow_hybrid()
    result = run(model, hybrid_pic(repaired=33), requests)
    full = run(model, hybrid_pic(), [_ordered(request) for request in requests])
    for request in requests:
        assert apart(result.of(request), full.of(request)) < 1e-5


def _ordered(request: Request) -> Request:
    """The same prompt as text."""
    spans = [type(span)(span.tokens) for span in request.spans]
    return make_request(request.id, *spans, output=request.output_len, at=request.arrived_at)


def test_a_map_that_includes_the_repaired_tokens_is_noticed(monkeypatch):
    """The tests above would fail if repaired tokens were counted twice: their map is not folded in again."""
    monkeypatch.setattr(BeginAfterRepair, "run", lambda *given: None)
    requests = mixed()[:1]
    result = run(make_slow_hybrid(), hybrid_pic(repaired=5), requests)
    assert worst(result, requests, repaired=5) > 1e-3


def test_a_stored_map_weighs_its_second_state():
    result = run(make_slow_hybrid(), hybrid_pic("scalar", repaired=5), [questions([(0, 1)], (20, 33))[0]])
    stored = result.engine.memory.maps.maps.stored
    assert result.engine.policy.store.state_cached == 2 * stored.slot_bytes
    alone, rest = (stored.tensor(name, slice(None), 0) for name in ("alone", "written"))
    assert alone.shape == rest.shape
    assert not torch.equal(alone, rest)

"""Spans of hybrids, reused in any order through maps of the state, are a dense run of spans computed alone."""

from itertools import product

import numpy as np
import pytest
import torch

from spanlab.core.admission import BatchRules
from spanlab.core.request import Request
from spanlab.engine.oracle import check_maps
from spanlab.engine.states import MapScan

from ..support.products import every_pair, in_turn
from . import composed as oracle
from .composed import FORMS, composed, worst
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
    permutations,
    questions,
    random_tokens,
    run,
    start,
    text,
)
from .oracles import apart, far, twin_of

KINDS = ("qwen3_5_text", "qwen3_next")
RULES = {
    "whole": BatchRules(max_num_batched_tokens=4096, max_num_seqs=4),
    "chunked": BatchRules(max_num_batched_tokens=13, max_num_seqs=4),
    "one prompt a step": BatchRules(max_num_batched_tokens=13, max_num_seqs=4, enable_chunked_prefill=False),
}


def test_these_models_depend_on_text_before_a_span():
    """Else no test here would notice a map without A."""
    model = make_slow_hybrid()
    twin, request = twin_of(model), questions([(0, 1)], (40, 30))[0]
    with oracle.recording(twin) as maps:
        twin(input_ids=torch.from_numpy(random_tokens(0, 40))[None].long(), use_cache=True)
    assert min(float(torch.linalg.matrix_norm(span.a, ord=2).max()) for span in maps) > 0.5
    assert apart(composed(model, request, [0], oracle.last), composed(model, request, [0])) > 0.1


@pytest.mark.parametrize(
    ("kernel", "block_size", "rules"), every_pair(("rotate_queries", "rotate_keys"), (1, 16), RULES)
)
def test_every_order_of_three_documents_cold_and_warm(kernel, block_size, rules):
    lengths = (20, 1, 33)
    requests = questions(permutations(3), lengths, output=2)
    result = run(make_slow_hybrid(), hybrid_pic(block_size=block_size, kernel=kernel), requests, rules=RULES[rules])
    assert worst(result, requests) < 1e-5
    assert nothing_leaks(result)
    assert result.reused(requests) == [0] + [sum(length // block_size * block_size for length in lengths)] * 5


@pytest.mark.parametrize(("kind", "form", "block_size"), every_pair(KINDS, FORMS, (1, 16)))
def test_every_form_is_that_form_composed(kind, form, block_size):
    requests = questions([(0, 1, 2), (2, 0, 1), (1, 1, 0)], (20, 32, 33), output=2)
    result = run(make_slow_hybrid(kind), hybrid_pic(form, block_size), requests)
    assert worst(result, requests, FORMS[form]) < 1e-5
    assert nothing_leaks(result)


@pytest.mark.parametrize("rank", [1, 4, 24])
def test_low_rank_keeps_the_best_directions(rank):
    requests = questions([(0, 1, 2), (2, 0, 1)], (20, 32, 33), output=2)
    result = run(make_slow_hybrid(), hybrid_pic("low_rank", rank=rank), requests)
    assert worst(result, requests, oracle.low_rank(rank)) < 1e-4
    assert (worst(result, requests) < 1e-4) == (rank == 24)


def test_what_is_stored_in_bfloat16_is_composed_in_float32():
    requests = questions([(0, 1, 2), (2, 0, 1)], (20, 32, 33), output=2)
    result = run(make_slow_hybrid(), hybrid_pic(dtype="bfloat16"), requests)
    assert worst(result, requests, oracle.half) < 2e-4
    assert worst(result, requests) > 1e-3


@pytest.mark.parametrize("form", [*FORMS, "low_rank"])
def test_cold_and_warm_say_the_same_in_every_form(form):
    """A span that has just been computed is folded in the form that it is stored in."""
    first = questions([(0, 1, 2)], (20, 16, 33), output=2)[0]
    again = make_request(1, *first.spans, output=2, at=APART)
    exactly = {"rank": 4} if form == "low_rank" else {"dtype": "bfloat16"}  # factors are rounded differently each time
    result = run(make_slow_hybrid(), hybrid_pic(form, 16, **exactly), [first, again])
    assert result.records[1].reused_tokens == 16 + 16 + 32
    assert far(result.of(again), result.of(first)) < 1e-4


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_document_twice_in_a_prompt_is_composed_twice(block_size):
    requests = questions([(0, 1, 0), (0, 0), (1, 0, 1, 0)], (35, 20), output=3)
    result = run(make_slow_hybrid(), hybrid_pic(block_size=block_size), requests)
    assert worst(result, requests) < 1e-5
    assert nothing_leaks(result)


def test_spans_shorter_than_the_convolution():
    """Their windows are zeros followed by their tokens, because they were computed alone."""
    requests = questions([(0, 1, 2), (2, 1, 0), (1,), (0,)], (1, 2, 3), tail=1, output=3)
    result = run(make_slow_hybrid(), hybrid_pic(), requests)
    assert worst(result, requests) < 1e-5
    assert result.reused(requests) == [0, 6, 2, 1]


@pytest.mark.parametrize("head", [0, 1])
def test_a_span_at_the_beginning_is_not_text_at_the_beginning(head):
    """Both are computed from nothing, but one leaves a state and the other a map."""
    spans = [document(0, 70)] if head else []
    requests = [
        make_request(0, text(0, 70), text(QUESTION, 7)),
        make_request(1, document(0, 70), text(QUESTION, 7), at=APART),
        make_request(2, text(HEAD, 9), *spans, document(0, 70), text(QUESTION, 7), at=2 * APART),
        make_request(3, text(0, 70), text(QUESTION - 1, 7), at=3 * APART),
    ]
    result = run(make_slow_hybrid(), hybrid_pic(placement="block_64"), requests)
    assert worst(result, requests) < 1e-5
    assert result.reused(requests) == [0, 0, 70 * (1 + head), 64]
    assert nothing_leaks(result)


@pytest.mark.parametrize("block_size", [1, 64])
def test_text_behind_equal_spans_resumes_from_checkpoints(block_size):
    def spans(first: int, second: int, question: int):
        return text(HEAD, 70), document(first, 64), text(5, 150), document(second, 128), text(6, 140), text(question, 5)

    requests = [
        make_request(0, *spans(0, 1, 100), output=2),
        make_request(1, *spans(0, 1, 101), output=2, at=APART),
        make_request(2, *spans(0, 2, 102), output=2, at=2 * APART),
        make_request(3, *spans(2, 1, 103), output=2, at=3 * APART),
    ]
    result = run(make_slow_hybrid(), hybrid_pic(block_size=block_size, placement="block_64"), requests)
    assert worst(result, requests) < 1e-5
    assert nothing_leaks(result)
    heads, spans_found = (0, 64, 64, 64), (0, 64 + 128, 64, 128)
    text_behind = (0, 64 + 64, 64, 0)  # up to the last state on the text's own grid; another span makes it another text
    assert result.reused(requests) == [sum(found) for found in zip(heads, spans_found, text_behind, strict=True)]


def crowd(count: int, longest: int, output: int, apart_ns: int, seed: int = 3) -> list[Request]:
    """Prompts of five documents in any order and number, some twice, with text between them; many at once."""
    rng, requests = np.random.default_rng(seed), []
    lengths = [1, 3, *rng.integers(4, longest, 3).tolist()]
    for id in range(count):
        spans = [text(HEAD, 11)] if id % 3 else []
        for name in rng.choice(5, int(rng.integers(1, 5))):
            spans.append(document(int(name), lengths[name]))
            if rng.random() < 0.3:
                spans.append(text(50 + int(name), int(rng.integers(1, 80))))
        spans.append(text(-id // 2 - 9, int(rng.integers(1, 20))))
        requests.append(make_request(id, *spans, output=int(rng.integers(1, output)), at=id * apart_ns))
    return requests


CROWDED = {
    "chunked": BatchRules(max_num_batched_tokens=75, max_num_seqs=4),
    "whole prompts": BatchRules(max_num_batched_tokens=300, max_num_seqs=3, enable_chunked_prefill=False),
    "prefill first": BatchRules(max_num_batched_tokens=75, max_num_seqs=4, prefill_first=True),
    "planned ahead": BatchRules(max_num_batched_tokens=75, max_num_seqs=4, async_scheduling=True),
}


PAGED = [(1, "kv_only"), (1, "block_64"), (16, "block_64"), (16, "last")]


@pytest.mark.parametrize(("rules", "paged"), in_turn(CROWDED, PAGED))
def test_packed_chunked_and_warm(rules, paged):
    requests, (block_size, placement) = crowd(10, 60, 8, 2_500_000), paged
    strategy = hybrid_pic(block_size=block_size, placement=placement)
    result = start(make_slow_hybrid(), strategy, requests, rules=CROWDED[rules])
    for _ in range(2):
        result.serve(requests)
        assert worst(result, requests) < 1e-5
        assert nothing_leaks(result)


@pytest.mark.parametrize(
    ("block_size", "form"),
    [(1, "exact"), (16, "scalar"), *(pytest.param(*case, marks=pytest.mark.slow) for case in product((1, 16), FORMS))],
)
def test_preempted_and_evicted(block_size, form):
    requests, model = crowd(10, 40, 80, 0), make_slow_hybrid()
    strategy = hybrid_pic(form, block_size, placement="block_64")
    budget = least_budget(model, strategy, requests)
    result = run(model, strategy, requests, rules=CROWDED["chunked"], budget=budget, states=7)
    assert result.rows[0].preemptions > 0
    assert result.engine.policy.store.evicted_bytes > 0
    assert worst(result, requests, FORMS[form]) < 1e-5
    assert nothing_leaks(result)


@pytest.mark.parametrize("rules", ["whole", "chunked"])
@pytest.mark.parametrize(("form", "kind"), [("exact", "qwen3_5_text"), ("scalar", "qwen3_next")])
def test_spans_with_a_common_beginning_reuse_inner_maps(form, kind, rules):
    requests, strategy = beginnings([90, 60, 130, 75, 130]), hybrid_pic(form, 16, interval=32)
    result = run(make_slow_hybrid(kind), strategy, requests, rules=RULES[rules])
    assert worst(result, requests, FORMS[form]) < 1e-5
    assert nothing_leaks(result)
    assert result.reused(requests) == [0, 32, 80, 64, 128]


@pytest.mark.parametrize("interval", [None, 16])
def test_without_maps_within_only_whole_spans_are_found(interval):
    requests = beginnings([90, 60, 75])
    result = run(make_slow_hybrid(), hybrid_pic(interval=interval), requests)
    assert result.reused(requests) == ([0, 0, 60] if interval is None else [0, 48, 64])


def test_reuse_after_maps_were_evicted():
    orders = [(0, 1), (2, 3), (1, 0), (3, 2), (0, 3)]
    requests = questions(orders, (20, 40, 33, 64), output=2)
    result = start(make_slow_hybrid(), hybrid_pic(), requests, states=5)
    for request in requests:
        result.serve([request])
        assert worst(result, [request]) < 1e-5
        assert nothing_leaks(result)
    assert result.engine.policy.store.evicted_bytes > 0
    assert any(result.reused(requests))


@pytest.mark.parametrize("length", [700, pytest.param(2000, marks=pytest.mark.slow)])
def test_long_spans_in_chunks(length):
    requests = questions([(0, 1), (1, 0)], (length, 65), output=2)
    rules = BatchRules(max_num_batched_tokens=300, max_num_seqs=2)
    result = run(make_slow_hybrid(), hybrid_pic(), requests, rules=rules)
    assert worst(result, requests) < 1e-5
    assert result.reused(requests) == [0, length + 65]


@pytest.mark.parametrize("kind", KINDS)
def test_a_scan_that_drops_a_is_found_out(kind, monkeypatch):
    model = make_slow_hybrid(kind)
    check_maps(model)
    memory = MapScan.memory

    def forgetful(*given):
        state, transition = memory(*given)
        return state, torch.zeros_like(transition)

    monkeypatch.setattr(MapScan, "memory", forgetful)
    with pytest.raises(ValueError, match=r"spans\.maps with model\.name=slow .*: expected recurrent layers"):
        check_maps(model)


def test_a_stored_map_has_the_counted_bytes():
    for form, rank, dtype in (("exact", None, "float32"), ("scalar", None, "bfloat16"), ("low_rank", 3, "bfloat16")):
        strategy = hybrid_pic(form, rank=rank, dtype=dtype)
        request = questions([(0, 1)], (20, 33))[0]
        result = run(make_slow_hybrid(), strategy, [request])
        stored = result.engine.memory.maps.maps.stored
        assert result.engine.policy.store.state_cached == 2 * stored.slot_bytes
        assert sum(stored.tensor(name, slice(None), 0).nbytes for name in stored.specs) == stored.slot_bytes

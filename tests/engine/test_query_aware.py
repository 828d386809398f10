"""Repair of the tokens that the query attends to most (M10), against transformers' own attention weights."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from spanlab.core.batch_rules import BatchRules
from spanlab.core.step_features import SpanReads, features
from spanlab.engine.probe import Probe

from .factories import (
    HEAD,
    arm,
    document,
    make_request,
    make_small,
    nothing_leaks,
    permutations,
    questions,
    run,
    start,
    text,
)
from .oracles import apart, dense, most_read, wrong

LENGTHS, LAYERS = (20, 9, 33), 6
SETS = ([0], [5], [1, 4], [0, 1, 2, 3, 4, 5])
FORMS = {
    "pages shared": {},
    "keys raw": {"keys": "raw", "kernel": "rotate_keys"},
    "own copies": {"sharing": "private"},
    "own copies, rotated": {"kernel": "pre_rotated", "sharing": "private"},
}


def probing(block_size: int = 1, form: str = "pages shared", **repair: object):
    """A query-aware arm; nine tokens of its documents if nothing else is asked for."""
    given = {"kind": "attention"} | (repair if {"k", "ratio"} & set(repair) else repair | {"ratio": 0.15})
    return arm("query_aware_16", block_size, given, **FORMS[form])


def parted(output: int = 1):
    """Prompts that meet, with text between their documents and one document twice."""
    return [
        make_request(0, text(HEAD, 9), document(0, 20), text(5, 6), document(1, 33), text(6, 8), output=output),
        make_request(1, text(HEAD, 9), document(1, 33), document(0, 20), document(1, 33), text(7, 3), output=output),
        make_request(2, document(2, 18), text(5, 6), document(0, 20), text(8, 4), output=output),
    ]


@pytest.fixture
def chosen(monkeypatch) -> list[np.ndarray]:
    """Prompt positions that every probe chooses."""
    seen, choose = [], Probe.chosen
    monkeypatch.setattr(Probe, "chosen", lambda self, count: seen.append(choose(self, count)) or seen[-1])
    return seen


@pytest.mark.parametrize(
    ("form", "block_size"),
    [
        *product(FORMS, [16]),
        ("pages shared", 1),
        *(pytest.param(form, 1, marks=pytest.mark.slow) for form in FORMS if form != "pages shared"),
    ],
)
def test_logits_are_those_of_the_dense_repair(form, block_size):
    requests, strategy = questions(permutations(3), LENGTHS, output=2), probing(block_size, form)
    result = run(make_small(layers=LAYERS), strategy, requests)
    assert max(wrong(result, strategy, request) for request in requests) < 1e-4
    assert {record.repaired_tokens for record in result.records.values()} == {9}
    assert nothing_leaks(result)


@pytest.mark.parametrize(
    ("architecture", "layers"),
    [
        *(("llama", layers) for layers in SETS),
        ("qwen2", [1, 4]),
        *(pytest.param("qwen2", layers, marks=pytest.mark.slow) for layers in SETS if layers != [1, 4]),
    ],
)
def test_the_most_read_tokens_of_those_layers_are_chosen(chosen, architecture, layers):
    model = make_small(architecture, layers=LAYERS)
    requests, strategy = questions(permutations(3), LENGTHS), probing(16, layers=layers)
    repair = run(model, strategy, requests).engine.policy.rules.repair
    assert [places.tolist() for places in chosen] == [most_read(model, request, repair) for request in requests]


def test_layers_choose_differently():
    model, request = make_small(layers=LAYERS), questions([(0, 1, 2)], LENGTHS)[0]
    sets = [most_read(model, request, probing(layers=[layer]).spans.repair) for layer in range(LAYERS)]
    assert len({tuple(places) for places in sets}) > 3


def test_the_middle_third_is_profiled_where_nothing_is_said():
    repair = probing().spans.repair
    assert [repair.of_model(layers).layers for layers in (1, 2, 3, 6, 7)] == [[0], [0, 1], [1], [2, 3], [2, 3, 4]]
    assert repair.of_model(30).layers == list(range(10, 20))


@pytest.mark.parametrize("budget", [4096, 23])
def test_text_between_spans_is_read_and_taken_along(budget):
    strategy = probing(16, ratio=0.3)
    rules = BatchRules(max_num_batched_tokens=budget, max_num_seqs=3)
    result = run(make_small(layers=LAYERS), strategy, parted(output=3), rules=rules)
    assert max(wrong(result, strategy, request) for request in parted(output=3)) < 1e-4
    assert nothing_leaks(result)


@pytest.mark.parametrize("form", FORMS)
def test_everything_repaired_is_full_recompute(form):
    requests, model = questions(permutations(3), LENGTHS, output=2), make_small(layers=LAYERS)
    result = run(model, probing(16, form, ratio=1.0), requests)
    for request in requests:
        assert apart(result.of(request), dense(model, request, result.engine.outputs[request.id], blocks=False)) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_nothing_repaired_is_plain_reuse(form):
    requests, model = questions(permutations(3), LENGTHS, output=2), make_small(layers=LAYERS)
    result = run(model, probing(16, form, ratio=0.0), requests)
    for request in requests:
        assert apart(result.of(request), dense(model, request, result.engine.outputs[request.id], blocks=True)) < 1e-5


def test_the_budget_is_that_of_lego_link():
    requests = questions(permutations(3), LENGTHS)
    asked, lego = (run(make_small(), arm(name), requests) for name in ("query_aware_16", "lego_link_16"))
    for request in requests:
        assert asked.records[request.id].repaired_tokens == lego.records[request.id].repaired_tokens == 16 + 9 + 16


def test_the_gold_answer_chooses_nothing(chosen):
    request, model = questions([(0, 1, 2)], LENGTHS)[0], make_small(layers=LAYERS)
    for token in (3, 200):
        told = replace(request, output=np.array([token, 9], np.int32), output_len=2)
        run(model, probing(), [told])
    assert len(chosen) == 2
    assert np.array_equal(*chosen)


def test_the_probe_ends_with_the_last_profiled_layer():
    """Rows through the MLP of each layer: of a warm prompt the query and text between pass those before it."""
    model, passed = make_small(layers=LAYERS), []
    result = run(model, probing(layers=[1, 3]), parted()[:1])
    handles = [
        layer.mlp.register_forward_hook(lambda module, given, out: passed.append(out.shape[1]))
        for layer in model.hf.base_model.layers
    ]
    try:
        result.serve([make_request(9, *parted()[0].spans[:-1], text(60, 8), at=10**13)])
    finally:
        for handle in handles:
            handle.remove()
    assert passed == [6 + 8] * 3 + [6 + 7] * LAYERS + [8] * LAYERS


def test_a_step_counts_the_rows_and_pairs_of_the_probe():
    result, counted = start(make_small(layers=LAYERS), probing(layers=[1, 3]), parted()[:1]), []
    compute, rules = result.engine.run, result.engine.policy.rules

    def counting(step, *times):
        counted.append(features(step, 0, rules, SpanReads()))
        return compute(step, *times)

    result.engine.run = counting
    result.serve(parted()[:1])
    (first, *_) = counted
    pairs = sum(place + 1 for place in (*range(29, 35), *range(68, 76)))
    assert first.shallow_token_layers == 14 * 3
    assert first.shallow_pair_layers == pairs * (3 + 1 + 2)
    assert first.projected_tokens == 14
    assert first.num_forwards == 4  # documents, the probe, the repair, the question

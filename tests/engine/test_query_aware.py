"""Repair of the tokens that the query attends to most (M10), against transformers' own attention weights."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from spanlab.core.step import SpanReads, features
from spanlab.engine.repair import Probe

from .factories import (
    KERNELS,
    arm,
    make_request,
    make_small,
    parted,
    permutations,
    questions,
    rows_of_layers,
    run,
    start,
    text,
)
from .oracles import most_read, run_checked

LENGTHS, LAYERS = (20, 9, 33), 6
SETS = ([0], [5], [1, 4], [0, 1, 2, 3, 4, 5])
FORMS = KERNELS | {"own copies": {"sharing": "private"}}


def probing(block_size: int = 1, form: str = "rotate_queries", **repair: object):
    """A query-aware arm; nine tokens of its documents by default."""
    given = {"kind": "attention"} | (repair if {"k", "ratio"} & set(repair) else repair | {"ratio": 0.15})
    return arm("query_aware_16", block_size, given, **FORMS[form])


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
        ("rotate_queries", 1),
        *(pytest.param(form, 1, marks=pytest.mark.slow) for form in FORMS if form != "rotate_queries"),
    ],
)
def test_logits_are_those_of_the_dense_repair(form, block_size):
    requests = questions(permutations(3), LENGTHS, output=2)
    result = run_checked(make_small(layers=LAYERS), probing(block_size, form), requests)
    assert {record.repaired_tokens for record in result.records.values()} == {9}


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


def test_the_middle_third_is_profiled_by_default():
    repair = probing().spans.repair
    assert [repair.of_model(layers).layers for layers in (1, 2, 3, 6, 7)] == [[0], [0, 1], [1], [2, 3], [2, 3, 4]]
    assert repair.of_model(30).layers == list(range(10, 20))


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
    model = make_small(layers=LAYERS)
    result = run(model, probing(layers=[1, 3]), parted()[:1])
    with rows_of_layers(model) as passed:
        result.serve([make_request(9, *parted()[0].spans[:-1], text(60, 8), at=10**13)])
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

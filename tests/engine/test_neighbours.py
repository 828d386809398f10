"""Repair of the tokens that attend most to the text before their span, against float64 attention weights."""

import pytest
import torch

from spanlab.engine.repair import RowChooser

from .factories import arm, document, make_request, make_small, permutations, questions, run, text
from .oracles import blending, run_checked

LENGTHS, LAYERS, HEAD = (20, 9, 33), 6, 11


def neighbours(block_size: int = 1, **repair: object):
    """A neighbour-aware arm; nine tokens of its documents by default."""
    given = {"kind": "neighbours"} | (repair if {"k", "ratio"} & set(repair) else repair | {"ratio": 0.15})
    return arm("neighbour_aware_16", block_size, given)


@pytest.fixture
def choosers(monkeypatch) -> list[RowChooser]:
    """Every chooser that runs."""
    seen: list[RowChooser] = []

    class Watched(RowChooser):
        def __init__(self, *given) -> None:
            super().__init__(*given)
            seen.append(self)

    monkeypatch.setattr("spanlab.engine.repair.RowChooser", Watched)
    return seen


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize(("ratio", "check_layer"), [(0.15, 1), (0.4, 3), (0.02, 5)])
def test_logits_are_those_of_the_recomputation(ratio, check_layer, block_size):
    requests = questions([(0, 1, 2), (2, 1, 0), (1, 2)], LENGTHS, output=2)
    strategy = neighbours(block_size, ratio=ratio, check_layer=check_layer)
    result = run_checked(make_small(layers=LAYERS), strategy, requests)
    assert result.records[0].repaired_tokens == int(ratio * 62)


@pytest.mark.parametrize("check_layer", [1, 4])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_tokens_that_look_out_most_are_chosen(choosers, architecture, check_layer):
    requests = questions(permutations(3), LENGTHS)
    result = run(make_small(architecture, layers=LAYERS), neighbours(check_layer=check_layer), requests)
    repair = result.engine.policy.rules.repair
    for chooser, request in zip(choosers, requests, strict=True):
        truth = blending(result.engine.model, request, result.engine.outputs[request.id], repair)
        assert (chooser.rows + HEAD).tolist() == truth.kept[-1].tolist()


def test_text_between_spans_is_taken_along(choosers):
    spans = text(-1, 9), document(0, 20), text(5, 6), document(1, 33), text(6, 8)
    run_checked(make_small(layers=LAYERS), neighbours(16, ratio=0.3), [make_request(0, *spans, output=2)])
    assert torch.isin(torch.arange(20, 26), choosers[0].rows).all()


def test_the_budget_is_that_of_lego_link():
    requests = questions(permutations(3), LENGTHS)
    result = run(make_small(), arm("neighbour_aware_16"), requests)
    assert {record.repaired_tokens for record in result.records.values()} == {16 + 9 + 16}

"""CacheBlend (M6) in its four forms, against a recomputation layer by layer in plain float64 torch."""

from __future__ import annotations

import pytest
import torch

from spanlab.engine.repair import RowChooser

from ..support.products import every_pair
from .factories import HEAD, arm, document, make_request, make_small, permutations, questions, rows_of_layers, run, text
from .oracles import blending, run_checked

LENGTHS = (20, 9, 33)
BETWEEN = {"score": "both", "filter": "layers"}
FORMS = {
    "as published": {"base": "prompt"},
    "as LMCache": {"base": "prompt", "score": "keys", "writes": "chosen"},
    "two whole layers": BETWEEN,
    "as written": BETWEEN | {"kind": "deviation_gradual"},
}
LAYERS, BEFORE = 6, 11 + sum(LENGTHS)  # tokens before the suffix


def blend(ratio: float, block_size: int = 1, **more: object):
    """CacheBlend of a share of tokens."""
    return arm("cache_blend_15", block_size, repair={"kind": "deviation", "ratio": ratio, **more})


forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@pytest.fixture
def watched(monkeypatch) -> list[RowChooser]:
    """Every chooser that runs, each with `measured` (layer order) and `history`, the rows kept before and after."""
    seen: list[Watched] = []

    class Watched(RowChooser):
        def __init__(self, *inputs) -> None:
            super().__init__(*inputs)
            self.measured, self.history, self.free = [], [self.rows], self._free
            seen.append(self)

        def rank(self, scores) -> None:
            super().rank(scores)
            self.measured.append(self._scores[self.free[self.rows]])

        def keep(self, layer):
            chosen = super().keep(layer)
            self.history.append(self.rows)
            return chosen

    monkeypatch.setattr("spanlab.engine.repair.RowChooser", Watched)
    return seen


@pytest.mark.parametrize(("name", "share", "block_size"), every_pair(FORMS, ((0.15, 1), (0.4, 2), (0.01, 1)), (1, 16)))
def test_logits_are_those_of_the_recomputation(name, share, block_size):
    form, (ratio, check_layer) = FORMS[name], share
    requests = questions([(0, 1, 2), (2, 1, 0), (1, 2)], LENGTHS, output=2)
    strategy = blend(ratio, block_size, check_layer=check_layer, **form)
    result = run_checked(make_small(layers=LAYERS), strategy, requests)
    base = BEFORE if form.get("base") else sum(LENGTHS)
    assert result.records[0].repaired_tokens == int(ratio * base + 1e-9)


@forms
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_same_tokens_are_chosen_in_every_layer(watched, form, architecture):
    requests = questions(permutations(3), LENGTHS)
    result = run(make_small(architecture, layers=LAYERS), blend(0.15, **form), requests)
    assert len(watched) == len(requests)
    for chooser, request in zip(watched, requests, strict=True):
        repair = result.engine.policy.rules.repair
        truth = blending(result.engine.model, request, result.engine.outputs[request.id], repair)
        places = torch.arange(11, BEFORE)  # of its rows, which are all tokens of spans
        chosen = [places[kept].tolist() for kept in chooser.history]
        assert chosen == [kept.tolist() for kept in truth.kept]


@pytest.mark.parametrize(("name", "whole"), [("as published", 1), ("as LMCache", 1), ("two whole layers", 2)])
def test_a_row_that_is_not_chosen_passes_only_the_layers_before(name, whole):
    """All rows pass only in layers before the first selection."""
    model = make_small(layers=LAYERS)
    with rows_of_layers(model) as passed:
        run(model, blend(0.15, **FORMS[name]), questions([(0, 1, 2)], LENGTHS))
    count = int(0.15 * (BEFORE if whole == 1 else sum(LENGTHS)))
    assert passed[LAYERS : 2 * LAYERS] == [sum(LENGTHS)] * whole + [count] * (LAYERS - whole)


@pytest.mark.parametrize("name", ["cache_blend_15", "as_seen_blend_15"])
@pytest.mark.parametrize("block_size", [1, 16])
def test_nothing_deviates_in_the_first_layer(monkeypatch, watched, block_size, name):
    requests = questions(permutations(3), LENGTHS)
    repair = {"kind": "deviation", "ratio": 0.15, **BETWEEN}
    result = run(make_small(layers=LAYERS), arm(name, block_size, repair), requests[:1])
    monkeypatch.setattr(RowChooser, "measures", lambda self, layer: layer < self._first)
    result.serve(requests[1:])
    warm = [chooser for chooser in watched if chooser.measured and len(chooser.measured) == 2]
    assert len(warm) == len(requests) - 1
    for chooser in warm:
        first, second = chooser.measured
        assert len(first) > 20
        assert first.sqrt().max() <= 1e-5
        assert second.sqrt().max() > 0.1


def test_one_set_is_chosen_and_has_all_that_must_be_kept(watched):
    spans = text(HEAD, 9), document(0, 20), text(5, 6), document(1, 33), text(6, 8)
    run(make_small(layers=LAYERS), blend(0.15, base="prompt"), [make_request(0, *spans)])
    (chooser,) = watched
    before, after = chooser.history[0], chooser.history[-1]
    assert [len(kept) for kept in chooser.history] == [59, *[6 + 10] * (LAYERS - 1)]  # 10 of 68 tokens
    must = (~chooser.free).nonzero().flatten()
    assert torch.isin(must, after).all()
    assert must.tolist() == list(range(20, 26))
    assert torch.isin(after, before).all()


def test_as_written_sets_are_nested_and_their_mean_is_the_ratio(watched):
    requests = questions([(0, 1, 2), (2, 1, 0)], LENGTHS)
    run(make_small(layers=LAYERS), blend(0.15, **FORMS["as written"]), requests)
    for chooser in watched:
        sizes = [len(kept) for kept in chooser.history]
        assert sizes[:2] == [62, 62]
        assert sizes[2:] == sorted(sizes[2:], reverse=True)
        assert sizes[2] > sizes[-1]
        assert abs(sum(sizes[2:]) / (LAYERS - 2) - 9) <= 0.5
        pairs = zip(chooser.history, chooser.history[1:], strict=False)
        assert all(torch.isin(later, earlier).all() for earlier, later in pairs)


@pytest.mark.parametrize(("filter", "layer", "last"), [("queries", LAYERS, 5), ("layers", LAYERS - 1, 4)])
def test_check_layers_that_leave_nothing_out_are_refused(filter, layer, last):
    requests = questions([(0,)], LENGTHS)
    with pytest.raises(ValueError, match=rf"repair.check_layer={layer}: expected a layer from 1 to {last} of small"):
        run(make_small(layers=LAYERS), blend(0.15, check_layer=layer, filter=filter), requests)


@pytest.mark.parametrize("form", ["as published", "as LMCache"])
def test_the_last_layer_may_filter_its_queries(form):
    strategy = blend(0.15, check_layer=LAYERS - 1, **FORMS[form])
    run_checked(make_small(layers=LAYERS), strategy, questions([(0, 1, 2), (2, 1, 0)], LENGTHS))


def test_requests_are_blended_one_by_one_in_a_shared_step():
    requests = questions([(0, 1), (1, 2), (2, 0)], LENGTHS, output=4, at=0)
    result = run_checked(make_small(layers=LAYERS), blend(0.3), requests)
    assert len({record.admitted_s for record in result.records.values()}) == 1

"""CacheBlend (M6): as coded and as written, against a recomputation layer by layer in plain torch."""

from __future__ import annotations

import pytest
import torch

from spanlab.engine.deviation import DeviationChooser

from .factories import APART, HEAD, arm, ask, document, make_small, nothing_leaks, permutations, questions, run, text
from .oracles import dense, far, wrong

LENGTHS = (20, 9, 33)
KINDS = {"as coded": "deviation", "as written": "deviation_gradual"}
LAYERS = 6


def blend(ratio: float, kind: str = "deviation", page: int = 1, **more: object):
    """CacheBlend of a share of tokens."""
    return arm("cache_blend_15", page, repair={"kind": kind, "ratio": ratio, **more})


@pytest.fixture
def watched(monkeypatch) -> list[DeviationChooser]:
    """Every chooser that runs, each with `measured` (layer order) and `history`, the rows kept before and after."""
    seen: list[Watched] = []

    class Watched(DeviationChooser):
        def __init__(self, *given) -> None:
            super().__init__(*given)
            self.measured, self.history, self.free = [], [self.kept], given[-1]
            seen.append(self)

        def measure(self, new, stored) -> None:
            super().measure(new, stored)
            self.measured.append(self._deviation[self.free[self.kept]])

        def keep(self, layer):
            chosen = super().keep(layer)
            self.history.append(self.kept)
            return chosen

    monkeypatch.setattr("spanlab.engine.engine.DeviationChooser", Watched)
    return seen


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("ratio", "check_layers"), [(0.15, 2), (0.4, 3), (0.01, 2)])
def test_logits_are_those_of_the_recomputation(kind, ratio, check_layers, page):
    requests = questions([(0, 1, 2), (2, 1, 0), (1, 2)], LENGTHS, output=2)
    strategy = blend(ratio, kind, page, check_layers=check_layers)
    done = run(make_small(layers=LAYERS), strategy, requests)
    assert max(wrong(done, strategy, request) for request in requests) < 1e-4
    assert done.records[0].repaired_tokens == int(ratio * sum(LENGTHS) + 1e-9)
    assert nothing_leaks(done)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("page", [1, 16])
def test_everything_repaired_is_full_recompute(page, kind):
    requests = questions(permutations(3), LENGTHS, output=2)
    done = run(make_small(layers=LAYERS), blend(1.0, kind, page), requests)
    for request in requests:
        truth = dense(make_small(layers=LAYERS), request, done.engine.outputs[request.id], blocks=False)
        assert far(done.of(request), truth) < 1e-4


@pytest.mark.parametrize("name", ["cache_blend_15", "as_seen_blend_15"])
@pytest.mark.parametrize("page", [1, 16])
def test_nothing_deviates_in_the_first_layer(monkeypatch, watched, page, name):
    requests = questions(permutations(3), LENGTHS)
    done = run(make_small(layers=LAYERS), arm(name, page), requests[:1])
    monkeypatch.setattr(DeviationChooser, "measures", lambda self, layer: layer < self._first)
    done.serve(requests[1:])
    warm = [chooser for chooser in watched if chooser.measured and len(chooser.measured) == 2]
    assert len(warm) == len(requests) - 1
    for chooser in warm:
        first, second = chooser.measured
        assert len(first) > 20
        assert first.sqrt().max() <= 1e-5
        assert second.sqrt().max() > 0.1


def test_as_coded_one_set_is_chosen_and_has_all_that_must_be_kept(watched):
    spans = text(HEAD, 9), document(0, 20), text(5, 6), document(1, 33), text(6, 8)
    run(make_small(layers=LAYERS), blend(0.15), [ask(0, *spans)])
    (chooser,) = watched
    before, after = chooser.history[0], chooser.history[-1]
    assert [len(kept) for kept in chooser.history] == [59, 59, *[6 + 7] * (LAYERS - 2)]
    must = (~chooser.free).nonzero().flatten()
    assert torch.isin(must, after).all()
    assert must.tolist() == list(range(20, 26))
    assert torch.isin(after, before).all()


def test_as_written_sets_are_nested_and_their_mean_is_the_ratio(watched):
    requests = questions([(0, 1, 2), (2, 1, 0)], LENGTHS)
    run(make_small(layers=LAYERS), blend(0.15, "deviation_gradual"), requests)
    for chooser in watched:
        sizes = [len(kept) for kept in chooser.history]
        assert sizes[:2] == [62, 62]
        assert sizes[2:] == sorted(sizes[2:], reverse=True)
        assert sizes[2] > sizes[-1]
        assert abs(sum(sizes[2:]) / (LAYERS - 2) - 9) <= 0.5
        pairs = zip(chooser.history, chooser.history[1:], strict=False)
        assert all(torch.isin(later, earlier).all() for earlier, later in pairs)


def test_text_between_spans_is_taken_along():
    def spans(first: int, second: int):
        return text(HEAD, 9), document(first, 20), text(5, 6), document(second, 33), text(6, 8)

    requests = [ask(0, *spans(0, 1), output=2), ask(1, *spans(1, 0), at=APART), ask(2, *spans(0, 1), at=2 * APART)]
    strategy = blend(0.3)
    done = run(make_small(layers=LAYERS), strategy, requests)
    assert max(wrong(done, strategy, request) for request in requests) < 1e-4


@pytest.mark.parametrize("layers", [1, LAYERS])
def test_check_layers_that_measure_nothing_are_refused(layers):
    requests = questions([(0,)], LENGTHS)
    with pytest.raises(ValueError, match=rf"repair.check_layers={layers}: expected (2 or more|fewer than the 6 )"):
        run(make_small(layers=LAYERS), blend(0.15, check_layers=layers), requests)


def test_requests_are_blended_one_by_one_in_a_shared_step():
    requests = questions([(0, 1), (1, 2), (2, 0)], LENGTHS, output=4, at=0)
    strategy = blend(0.3)
    done = run(make_small(layers=LAYERS), strategy, requests)
    assert len({record.admitted_s for record in done.records.values()}) == 1
    assert max(wrong(done, strategy, request) for request in requests) < 1e-4

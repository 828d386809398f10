"""The chooser of a measured repair, fed with made-up deviations."""

import pytest
import torch

from spanlab.core.repair import Repair
from spanlab.engine.repair import RowChooser, deviations


def states(of_rows: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [T, 1, 2] whose squares sum to `of_rows`, half of it each, against zero."""
    half = (torch.tensor(of_rows) / 2).sqrt()
    return tuple(torch.stack([half, torch.zeros_like(half)], -1)[:, None] for _ in range(2))


BETWEEN = {"score": "both", "filter": "layers"}


def zero(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Nothing stored."""
    return torch.zeros(count, 1, 2), torch.zeros(count, 1, 2)


def feed(chooser: RowChooser, of_rows: list[float], layers: int) -> list[list[int]]:
    """Rows kept before each layer, with deviations that belong to rows and never change."""
    kept = [chooser.rows.tolist()]
    for layer in range(layers):
        if chooser.projects(layer):
            here = [of_rows[row] for row in chooser.rows.tolist()]
            chooser.rank(deviations("both", states(here), zero(len(here))))
        if layer:
            before = chooser.rows
            chosen = chooser.keep(layer)
            if chosen is not None:
                assert chooser.rows.tolist() == before[chosen].tolist()
            kept.append(chooser.rows.tolist())
        if chooser.measures(layer):
            here = [of_rows[row] for row in chooser.rows.tolist()]
            chooser.rank(deviations("both", states(here), zero(len(here))))
    return kept


DEVIATIONS = [5.0, 1.0, 9.0, 2.0, 8.0, 3.0, 7.0, 4.0]


def test_between_layers_the_largest_stay_behind_the_check_layer():
    chooser = RowChooser(Repair("deviation", ratio=0.4, **BETWEEN), 3, 5, torch.ones(8, dtype=torch.bool))
    everyone = list(range(8))
    assert feed(chooser, DEVIATIONS, 5) == [everyone, everyone, [2, 4, 6], [2, 4, 6], [2, 4, 6]]


def test_as_published_the_check_layer_itself_is_passed_by_the_chosen():
    chooser = RowChooser(Repair("deviation", ratio=0.4), 3, 5, torch.ones(8, dtype=torch.bool))
    assert feed(chooser, DEVIATIONS, 5) == [list(range(8)), *[[2, 4, 6]] * 4]


@pytest.mark.parametrize(("score", "kept"), [("values", [0, 1]), ("keys", [2, 3]), ("both", [1, 2])])
def test_a_score_looks_at_keys_at_values_or_at_both(score, kept):
    keys, values = (torch.tensor(one)[:, None, None].sqrt() for one in ([0.0, 4, 7, 6], [9.0, 8, 5, 1]))
    chooser = RowChooser(Repair("deviation", score=score), 2, 3, torch.ones(4, dtype=torch.bool))
    chooser.rank(deviations(score, (keys, values), (torch.zeros(4, 1, 1), torch.zeros(4, 1, 1))))
    assert chooser.keep(1).tolist() == kept


def test_as_written_ever_fewer_stay():
    chooser = RowChooser(Repair("deviation_gradual", ratio=0.5, **BETWEEN), 4, 5, torch.ones(8, dtype=torch.bool))
    sizes = [[2, 4, 6, 0, 7, 5], [2, 4, 6, 0], [2, 4]]
    assert feed(chooser, DEVIATIONS, 5)[2:] == [sorted(rows) for rows in sizes]


def test_fixed_rows_stay_without_stored_entries():
    free = torch.tensor([True, False, True, True, True, True, False, True])
    chooser = RowChooser(Repair("deviation", ratio=0.3, **BETWEEN), 2, 4, free)
    chooser.keep(1)
    new, stored = states(DEVIATIONS), zero(8)
    for part in stored:
        part[~free] = torch.nan
    chooser.rank(deviations("both", new, stored))
    assert chooser.keep(2).tolist() == [1, 2, 4, 6]


@pytest.mark.parametrize("kind", ["deviation", "deviation_gradual"])
@pytest.mark.parametrize(("count", "kept"), [(8, 8), (0, 0)])
def test_all_and_none(kind, count, kept):
    chooser = RowChooser(Repair(kind, ratio=count / 8, **BETWEEN), count, 5, torch.ones(8, dtype=torch.bool))
    assert {len(rows) for rows in feed(chooser, DEVIATIONS, 5)[2:]} == {kept}


@pytest.mark.parametrize("layers", [3, 4, 7, 34])
@pytest.mark.parametrize("count", [1, 15, 60, 90])
def test_gradual_filtering_computes_the_ratio_in_the_mean(layers, count):
    chooser = RowChooser(
        Repair("deviation_gradual", ratio=count / 100, **BETWEEN), count, layers, torch.ones(100).bool()
    )
    sizes = [len(rows) for rows in feed(chooser, torch.rand(100).tolist(), layers)[2:]]
    assert sizes == sorted(sizes, reverse=True)
    assert abs(sum(sizes) / len(sizes) - count) <= 0.5
    assert max(sizes) <= min(100, 1.5 * count + 0.5)

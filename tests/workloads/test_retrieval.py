"""The modelled retriever draws by its formulas."""

from itertools import permutations

import numpy as np
import pytest

from spanlab.workloads.rag import ORDERS, Popularity, popularity, retrieve, zipf


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def deviations(counts: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """Deviation of each binomial count from its expectation, in standard deviations."""
    n = counts.sum()
    return np.abs(counts - n * chances) / np.sqrt(n * chances * (1 - chances))


def test_zipf_shares_are_the_formula_in_another_order():
    shares = zipf(4, 2.0, rng())
    total = 1 + 1 / 4 + 1 / 9 + 1 / 16
    assert sorted(shares, reverse=True) == pytest.approx([1 / total, 1 / 4 / total, 1 / 9 / total, 1 / 16 / total])
    assert zipf(5, 0.0, rng()).tolist() == [0.2] * 5
    assert len({int(np.argmax(zipf(4, 1.0, rng(seed)))) for seed in range(50)}) == 4


def test_passages_of_each_document_have_their_own_shares():
    shares = popularity([3, 1, 2], 1.0, 0.5, rng())
    assert shares.document_of.tolist() == [0, 0, 0, 1, 2, 2]
    assert np.bincount(shares.document_of, shares.passages) == pytest.approx([1, 1, 1])
    assert sorted(shares.documents) == pytest.approx([2 / 11, 3 / 11, 6 / 11])
    assert sorted(shares.passages[4:]) == pytest.approx(sorted([1 / (1 + 2**-0.5), 2**-0.5 / (1 + 2**-0.5)]))


def test_weights_mix_the_own_document_with_the_whole_corpus():
    shares = Popularity(np.array([0.75, 0.25]), np.array([0.9, 0.1, 1.0]), np.array([0, 0, 1]))
    assert shares.weights(0, 0.0) == pytest.approx([0.9, 0.1, 0.0])
    assert shares.weights(1, 1.0) == pytest.approx([0.675, 0.075, 0.25])
    assert shares.weights(1, 0.2) == pytest.approx([0.135, 0.015, 0.05 + 0.8])


def test_ranked_pairs_have_the_frequency_of_single_draws():
    weights = np.array([0.5, 0.0, 0.3, 0.15, 0.05])
    draw = rng(1)
    pairs = list(permutations([0, 2, 3, 4], 2))
    chances = np.array([weights[i] * weights[j] / (1 - weights[i]) for i, j in pairs])
    drawn = [tuple(retrieve(weights, 2, draw).tolist()) for _ in range(20_000)]
    assert set(drawn) <= set(pairs)
    counts = np.array([drawn.count(pair) for pair in pairs])
    assert deviations(counts, chances).max() < 4


def test_orders():
    ranked = np.array([7, 2, 9, 4])
    assert ORDERS["ranked"](ranked, rng()).tolist() == [7, 2, 9, 4]
    assert ORDERS["fixed"](ranked, rng()).tolist() == [2, 4, 7, 9]
    draw = rng(3)
    drawn = [tuple(ORDERS["shuffled"](ranked, draw).tolist()) for _ in range(24_000)]
    counts = np.array([drawn.count(order) for order in permutations(ranked.tolist())])
    assert deviations(counts, np.full(24, 1 / 24)).max() < 4
    assert ranked.tolist() == [7, 2, 9, 4]

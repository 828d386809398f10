"""Intervals of ratios over questions that share documents: what they cover, and where they have no bounds."""

from __future__ import annotations

import numpy as np
import pytest

from spanlab.analysis.clustered import SHARE, mean_interval, ratio_interval, separated
from spanlab.stats import Interval

DOCUMENTS, QUESTIONS = 25, 4


def drawn(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Benefits kept and whole benefits of questions; those of one document are alike, and skewed."""
    groups = np.repeat(np.arange(DOCUMENTS), QUESTIONS)
    shared = rng.gamma(2.0, 0.5, DOCUMENTS)[groups]
    below = shared + rng.gamma(2.0, 0.25, len(groups))
    kept = 0.7 + 0.2 * rng.standard_normal(DOCUMENTS)[groups]
    return kept * below, below, groups


def test_nineteen_of_twenty_intervals_hold_the_truth():
    truth, studies = 0.7, 400
    rng = np.random.default_rng(0)
    found = [ratio_interval(*drawn(rng)) for _ in range(studies)]
    covered = sum(one.low <= truth <= one.high for one in found) / studies
    assert 0.92 <= covered <= 0.98


def test_questions_that_are_taken_as_independent_cover_too_little():
    """Why documents are drawn: the interval over questions is much narrower than the spread of its means."""
    above, below, groups = drawn(np.random.default_rng(1))
    whole, single = ratio_interval(above, below, groups), ratio_interval(above, below, np.arange(len(groups)))
    assert whole.mean == single.mean
    assert whole.high - whole.low > 1.4 * (single.high - single.low)


def test_a_ratio_of_means_by_hand():
    found = ratio_interval(np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0, 4.0]), np.array([0, 1, 2]))
    assert found.mean == 6 / 8
    assert found.low < 6 / 8 < found.high


def test_one_document_has_no_bounds():
    assert mean_interval(np.array([1.0, 3.0]), np.array([5, 5])) == Interval(2.0, None, None)
    assert mean_interval(np.array([2.0, 2.0]), np.array([5, 6])) == Interval(2.0, 2.0, 2.0)
    assert mean_interval(np.array([0.0, 1.0, 1.0]), np.array([5, 6, 7]), SHARE).high == 1.0


@pytest.mark.parametrize(
    ("interval", "shown"),
    [((1.0, 0.1, 2.0), True), ((-1.0, -2.0, -0.1), True), ((0.1, -0.1, 0.3), False), ((1.0, None, None), False)],
)
def test_a_difference_is_shown_off_zero(interval, shown):
    assert separated(Interval(*interval)) is shown

"""Coverage of intervals of ratios over questions that share documents, and cases without bounds."""

import numpy as np
import pytest

from spanlab.stats import MOST_DRAWN, SHARE, Interval, interval_of_ratio, mean_interval, separated

DOCUMENTS, QUESTIONS = 25, 4


def drawn(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Kept benefits and full benefits of questions; those of one document are similar, and skewed."""
    groups = np.repeat(np.arange(DOCUMENTS), QUESTIONS)
    shared = rng.gamma(2.0, 0.5, DOCUMENTS)[groups]
    below = shared + rng.gamma(2.0, 0.25, len(groups))
    kept_share = 0.7 + 0.2 * rng.standard_normal(DOCUMENTS)[groups]
    return kept_share * below, below, groups


def test_nineteen_of_twenty_intervals_hold_the_truth():
    truth, studies = 0.7, 400
    rng = np.random.default_rng(0)
    intervals = [interval_of_ratio(*drawn(rng)) for _ in range(studies)]
    covered = sum(interval.low <= truth <= interval.high for interval in intervals) / studies
    assert 0.92 <= covered <= 0.98


def test_questions_that_are_taken_as_independent_cover_too_little():
    """Why documents are drawn: the interval over questions is much narrower than the spread of its means."""
    above, below, groups = drawn(np.random.default_rng(1))
    by_document, by_question = (
        interval_of_ratio(above, below, groups),
        interval_of_ratio(above, below, np.arange(len(groups))),
    )
    assert by_document.mean == by_question.mean
    assert by_document.high - by_document.low > 1.4 * (by_question.high - by_question.low)


def test_a_ratio_of_means_by_hand():
    interval = interval_of_ratio(np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0, 4.0]), np.array([0, 1, 2]))
    assert interval.mean == 6 / 8
    assert interval.low < 6 / 8 < interval.high


def test_more_documents_than_are_drawn_one_by_one_give_the_same_width():
    rng, documents = np.random.default_rng(2), 3 * MOST_DRAWN + 5
    below = rng.gamma(1.0, 1.0, documents)
    above = below * rng.uniform(0, 1, documents)
    interval = interval_of_ratio(above, below, np.arange(documents))
    error = np.std(above - interval.mean * below, ddof=1) / below.mean() / documents**0.5
    assert (interval.high - interval.low) / 2 == pytest.approx(1.96 * error, rel=0.1)


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

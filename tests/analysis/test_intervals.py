"""Intervals and McNemar's test against printed values and SciPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from spanlab.stats import (
    MOST_DRAWN,
    SHARE,
    Interval,
    interval_of_ratio,
    mcnemar,
    mean_interval,
    separated,
    share_interval,
)

outcomes = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60)


@given(st.integers(1, 80).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_shares_have_the_exact_interval_of_scipy(counts):
    expected = binomtest(*counts).proportion_ci(0.95, method="exact")
    assert share_interval(*counts) == pytest.approx((counts[0] / counts[1], expected.low, expected.high), abs=1e-12)


@given(outcomes)
def test_mcnemar_is_the_exact_binomial_test_of_scipy(pairs):
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    result, swapped = mcnemar(first, second), mcnemar(second, first)
    b, c = pairs.count((True, False)), pairs.count((False, True))
    assert (result.only_first, result.only_second) == (b, c) == (swapped.only_second, swapped.only_first)
    expected = binomtest(b, b + c, 0.5).pvalue if b + c else 1.0
    assert result.p_value == pytest.approx(expected, rel=1e-9)
    assert swapped.p_value == result.p_value


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: share_interval(3, 2), "right=3: expected 0 to 2"),
        (lambda: share_interval(0, 0), "right=0: expected 0 to 0, out of at least one"),
        (lambda: share_interval(0, 1, 0), "level=0: expected a probability"),
        (lambda: mcnemar([True], []), "second has 0 prompts, expected 1"),
    ],
)
def test_a_wrong_question_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# -- Coverage of intervals of ratios over questions that share documents, and cases without bounds. ---


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

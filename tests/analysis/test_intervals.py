"""Intervals and McNemar's test against printed values and SciPy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from spanlab.stats import mcnemar, share_interval

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

"""Divergences against values by hand, SciPy, and the properties that any divergence has."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import log_softmax, rel_entr

from spanlab.analyses.answers import Divergence, divergence, greedy_match, kl_rows, top1_rows

LOGIT = st.floats(-60, 60, width=32)
shapes = st.tuples(st.integers(1, 4), st.integers(1, 9))
pairs = shapes.flatmap(lambda shape: st.tuples(*[arrays(np.float32, shape, elements=LOGIT)] * 2))


def test_kl_by_hand():
    # p = (3/4, 1/4), q = (1/2, 1/2): KL(p‖q) = 3/4 ln 3/2 + 1/4 ln 1/2, KL(q‖p) = 1/2 ln 2/3 + 1/2 ln 2
    p, q = np.array([[math.log(3), 0.0]]), np.array([[5.0, 5.0]])
    assert kl_rows(p, q) == pytest.approx([0.75 * math.log(1.5) + 0.25 * math.log(0.5)], rel=1e-14)
    assert kl_rows(q, p) == pytest.approx([0.5 * math.log(2 / 3) + 0.5 * math.log(2)], rel=1e-14)


@given(pairs)
def test_kl_is_scipys_relative_entropy(both):
    p, q = (np.exp(log_softmax(logits.astype(np.float64), axis=1)) for logits in both)
    assert kl_rows(*both) == pytest.approx(rel_entr(p, q).sum(axis=1), rel=1e-9, abs=1e-12)


@given(pairs)
def test_kl_is_never_negative_and_zero_for_the_same_logits(both):
    assert (kl_rows(*both) >= 0).all()
    assert kl_rows(both[0], both[0]).tolist() == [0.0] * len(both[0])


@given(pairs, st.floats(-1e3, 1e3))
def test_adding_a_constant_to_a_row_changes_nothing(both, constant):
    p, q = (logits.astype(np.float64) for logits in both)
    assert kl_rows(p + constant, q) == pytest.approx(kl_rows(p, q), rel=1e-9, abs=1e-10)


def test_large_logits_neither_overflow_nor_vanish():
    p, q = np.array([[3e38, 0.0], [500.0, 0.0]], np.float32), np.array([[3e38, 0.0], [0.0, 500.0]], np.float32)
    assert kl_rows(p, q).tolist() == pytest.approx([0.0, 500.0])


def test_a_tiny_divergence_is_seen_in_float32_logits():
    # To second order KL = p(1 − p) δ² / 2, here p = 1/2 and δ = 2^-10
    p, q = np.array([[0, 0]], np.float32), np.array([[2.0**-10, 0]], np.float32)
    assert kl_rows(p, q) == pytest.approx([2.0**-20 / 8], rel=1e-5)


def test_top1_agreement_by_hand():
    p = np.array([[1, 2, 3], [3, 2, 1], [1, 1, 0]], np.float32)
    q = np.array([[0, 0, 9], [0, 5, 1], [7, 0, 7]], np.float32)
    assert top1_rows(p, q).tolist() == [True, False, True]
    result = divergence(p, q, greedy=False)
    assert result == Divergence(3, float(kl_rows(p, q).mean()), 2 / 3, False)


def test_half_precision_logits_are_taken_as_they_are():
    p = np.array([[1.5, 0.25]], np.float16)
    assert kl_rows(p, p * 2) == pytest.approx(kl_rows(p.astype(np.float64), p.astype(np.float64) * 2), rel=1e-12)


def test_greedy_decodings_match_to_the_last_token_or_not():
    assert greedy_match([1, 2, 3], (1, 2, 3))
    assert greedy_match(np.array([1, 2]), [1, 2])
    assert not greedy_match([1, 2, 3], [1, 2])
    assert not greedy_match([1, 2], [1, 3])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("measure", [kl_rows, top1_rows])
def test_logits_that_are_no_numbers_are_refused(bad, measure):
    good, spoilt = np.zeros((3, 4), np.float32), np.zeros((3, 4), np.float32)
    spoilt[1, 2] = bad
    with pytest.raises(ValueError, match="other logits hold NaN or infinity, first in row 1, expected finite"):
        measure(good, spoilt)
    with pytest.raises(ValueError, match="reference logits hold NaN or infinity, first in row 1"):
        measure(spoilt, good)


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        (((2, 3), (2, 4)), r"other logits have shape \(2, 4\), expected \(2, 3\)"),
        (((3,), (3,)), r"reference logits have shape \(3,\), expected \[tokens, vocabulary\]"),
        (((0, 3), (0, 3)), r"reference logits have shape \(0, 3\), expected"),
    ],
)
def test_logits_of_other_shapes_are_refused(shapes, sentence):
    with pytest.raises(ValueError, match=sentence):
        divergence(*(np.zeros(shape, np.float32) for shape in shapes))

"""Errors and spreads on numbers that can be checked by hand."""

import numpy as np
import pytest

from spanlab.analyses.fidelity import errors, gap, spread


def test_the_gap_is_signed_for_means_and_absolute_for_requests():
    result = gap(np.array([[1.0, 2.0, 4.0, 1.0]]), np.array([1.1, 1.8, 5.0, 1.0]))
    assert result["bias"] == pytest.approx(8.9 / 8 - 1)
    assert result["bias_s"] == pytest.approx(0.9 / 4)
    assert result["request_p50"] == pytest.approx(0.1)
    assert result["request_p95"] == pytest.approx(np.percentile([0.1, 0.1, 0.25, 0.0], 95))
    assert result["request_mean_s"] == pytest.approx((0.1 + 0.2 + 1.0) / 4)
    assert result["request_p50_s"] == pytest.approx(0.15)
    assert result["p95_bias_s"] == pytest.approx(np.percentile([1.1, 1.8, 5, 1], 95) - np.percentile([1, 2, 4, 1], 95))


def test_repeats_are_pooled_by_request_and_averaged_for_means():
    result = gap(np.array([[1.0, 1.0], [3.0, 3.0]]), np.array([2.0, 2.0]))
    assert result["bias"] == 0.0
    assert result["request_p50"] == pytest.approx((1.0 + 1 / 3) / 2)
    assert result["measured_p95_s"] == 2.0


def test_the_spread_of_repeats_is_over_all_their_pairs():
    result = spread(np.array([[1.0, 2.0], [1.0, 4.0], [3.0, 2.0]]))
    shares = [0.0, 2 / 3, 1.0, 0.0, 1.0, 2 / 3]
    assert result["request_p50"] == pytest.approx(np.median(shares))
    assert result["request_p95"] == pytest.approx(np.percentile(shares, 95))
    assert result["mean"] == pytest.approx((1 / 2.0 + 1 / 2.0 + 0.0) / 3)
    assert result["mean_s"] == pytest.approx((1.0 + 1.0 + 0.0) / 3)


def test_a_single_repeat_has_no_spread():
    assert spread(np.array([[1.0, 2.0]])) is None


def test_equal_repeats_that_are_predicted_have_neither_gap_nor_spread():
    delays = {"ttft_s": np.array([1.0, 2.0]), "tpot_s": np.array([0.1, np.nan]), "e2e_s": np.array([1.5, 2.0])}
    result = errors([delays, delays], delays)
    for metric in delays:
        assert result[metric]["bias"] == result[metric]["request_p95"] == 0.0
        assert result[metric]["spread"]["mean"] == result[metric]["spread"]["request_p95"] == 0.0
    assert result["tpot_s"]["measured_mean_s"] == 0.1


def test_no_request_with_a_second_token_has_no_error_of_tpot():
    delays = {"ttft_s": np.array([1.0]), "tpot_s": np.array([np.nan]), "e2e_s": np.array([1.0])}
    assert errors([delays], delays)["tpot_s"] is None

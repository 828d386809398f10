"""Two one-sided tests against their closed form, and against machines of growing noise."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from spanlab.analyses.fidelity import bias_interval, equivalent, errors, judge

MARGIN = 0.05


def tost(means: np.ndarray, predicted: float, margin: float) -> float:
    """Larger p value of the tests of predicted - (1 - margin) · mean > 0 and (1 + margin) · mean - predicted > 0."""
    above = stats.ttest_1samp(predicted - (1 - margin) * means, 0, alternative="greater")
    below = stats.ttest_1samp((1 + margin) * means - predicted, 0, alternative="greater")
    return max(above.pvalue, below.pvalue)


def test_the_interval_decides_as_both_tests_do():
    rng = np.random.default_rng(11)
    decided = []
    for _ in range(500):
        means = rng.normal(1.0, rng.uniform(0.005, 0.08), 5)
        predicted = rng.uniform(0.92, 1.08)
        shown = equivalent(bias_interval(means, predicted), MARGIN)
        assert shown == (tost(means, predicted, MARGIN) < 0.05)
        decided.append(shown)
    assert 50 < sum(decided) < 450, "one answer only, and the test says little"


def verdict(noise: np.ndarray, scale: float, bias: float) -> bool | None:
    """Whether a cell passes whose repeats differ from their mean by scale times `noise`."""
    measured = [np.array([1.0 + scale * step]) for step in noise]
    delays = [{"ttft_s": run, "e2e_s": run, "tpot_s": run} for run in measured]
    predicted = {key: np.array([1.0 + bias]) for key in delays[0]}
    cell = {"arm": "a", "load": 0.6, "rate_rps": 3.0, "errors": errors(delays, predicted)}
    mean = judge([cell], [])[0]
    return mean["met"]


ORDER = {True: 1, False: 0, None: 0}


@given(
    steps=st.lists(st.floats(-1, 1), min_size=3, max_size=8),
    bias=st.floats(-0.12, 0.12),
    scales=st.tuples(st.floats(0, 0.2), st.floats(0, 0.2)),
)
def test_more_noise_never_turns_a_failure_into_a_pass(steps, bias, scales):
    """The same mean and the same prediction; only the repeats lie further apart."""
    noise = np.array(steps) - np.mean(steps)
    calm, noisy = sorted(scales)
    assert ORDER[verdict(noise, noisy, bias)] <= ORDER[verdict(noise, calm, bias)]


@given(scale=st.floats(0, 0.3), bias=st.floats(0.0501, 0.5))
def test_an_error_beyond_the_goal_never_passes(scale, bias):
    noise = np.array([-1.0, 0.5, 0.5, 1.0, -1.0])
    assert verdict(noise, scale, bias) is not True
    assert verdict(noise, scale, -bias) is not True


def test_a_single_repeat_shows_nothing():
    assert bias_interval(np.array([1.0]), 1.0) is None
    assert not equivalent(None, MARGIN)


def test_repeats_that_reach_zero_leave_the_error_open_above():
    low, high = bias_interval(np.array([0.1, 2.0]), 1.0)
    assert high == math.inf
    assert not equivalent((low, high), MARGIN)


def test_equal_repeats_have_an_interval_without_width():
    assert bias_interval(np.ones(5), 1.04) == pytest.approx((0.04, 0.04))
    assert equivalent(bias_interval(np.ones(5), 1.04), MARGIN)

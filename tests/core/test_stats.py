"""Intervals and queueing closed forms against values worked out by hand or read from tables."""

import math
import subprocess
import sys

import numpy as np
import pytest

from spanlab.stats import holm, paired_ratio_interval, percentile, t_interval, t_quantile, t_test


@pytest.mark.parametrize(
    ("probability", "degrees", "table"), [(0.975, 1, 12.706), (0.975, 9, 2.262), (0.9995, 19, 3.883), (0.5, 5, 0.0)]
)
def test_t_quantiles_are_those_of_the_printed_table(probability, degrees, table):
    assert t_quantile(probability, degrees) == pytest.approx(table, abs=5e-4)


def test_t_interval_by_hand():
    # mean 3, s = sqrt(2.5), s / sqrt(5) = sqrt(0.5), t(4, 0.975) = 2.776445
    mean, low, high = t_interval([1, 2, 3, 4, 5])
    assert mean == 3
    assert low == pytest.approx(3 - 2.776445 * math.sqrt(0.5), abs=1e-6)
    assert high == pytest.approx(3 + 2.776445 * math.sqrt(0.5), abs=1e-6)


def test_one_value_has_a_mean_and_no_bounds():
    assert t_interval([7.0]) == (7.0, None, None)


def test_equal_values_have_a_bound_of_no_width():
    assert t_interval([2.0] * 4) == (2.0, 2.0, 2.0)


def test_a_higher_level_is_wider():
    narrow, wide = t_interval([1, 2, 4], 0.8), t_interval([1, 2, 4], 0.999)
    assert wide.low < narrow.low < narrow.mean < narrow.high < wide.high


def test_paired_ratios_cancel_what_the_seeds_share():
    noise = [1.0, 5.0, 25.0]
    assert paired_ratio_interval([3 * x for x in noise], noise) == pytest.approx((3.0, 3.0, 3.0))
    # logarithms 0 and ln 2: mean ln 2 / 2, s / sqrt(2) = ln 2 / 2, t(1, 0.975) = 12.7062
    middle, factor = math.sqrt(2), math.exp(12.70620474 * math.log(2) / 2)
    assert paired_ratio_interval([1, 4], [1, 2]) == pytest.approx((middle, middle / factor, middle * factor), rel=1e-6)


def test_a_paired_ratio_has_no_negative_end():
    """Ratios of 1, 50 and 400 once had an interval from -397 to 698."""
    found = paired_ratio_interval([1, 50, 400], [1, 1, 1])
    assert 0 < found.low < found.mean < found.high
    assert paired_ratio_interval([3], [2]) == (pytest.approx(1.5), None, None)


def test_a_p_value_is_that_of_the_printed_table():
    assert t_test([0, 2]) == pytest.approx(0.5)  # t = 1 with one degree of freedom: 1 - 2 · atan(1) / π
    # t(9, 0.975) = 2.262
    error = 1 / math.sqrt(10)
    values = np.arange(10.0) - 4.5
    values = values / values.std(ddof=1) + 2.262 * error
    assert t_test(values) == pytest.approx(0.05, abs=1e-4)
    assert t_test(-values) == t_test(values)


def test_a_p_value_agrees_with_the_interval():
    rng = np.random.default_rng(4)
    for _ in range(50):
        values = rng.normal(0.9, 1, 5)
        low, high = t_interval(values).ends
        assert (t_test(values) < 0.05) == (low > 0 or high < 0)


def test_equal_values_leave_no_doubt_and_one_value_all():
    assert (t_test([2.0] * 5), t_test([0.0] * 5)) == (0.0, 1.0)
    assert math.isnan(t_test([3.0]))


@pytest.mark.parametrize(
    ("p_values", "rejected"),
    [
        # 0.01 < 0.05 / 4; 0.015 < 0.05 / 3; 0.03 is not below 0.05 / 2, so 0.04 is not rejected either
        ([0.04, 0.01, 0.03, 0.015], [False, True, False, True]),
        ([0.02, 0.02, 0.02], [False, False, False]),
        ([0.049], [True]),
        ([math.nan, 0.02], [False, True]),
        ([math.nan, 0.03], [False, False]),
        ([], []),
    ],
)
def test_holm_compares_in_ascending_order(p_values, rejected):
    assert holm(p_values) == rejected


def test_percentile_interpolates_between_neighbours():
    assert percentile([10, 20, 30, 40], 50) == 25
    assert percentile([10, 20, 30, 40], 99) == pytest.approx(30 + 0.97 * 10)
    assert percentile([40, 10], 0) == 10
    assert percentile([5], 95) == 5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: t_interval([]), r"stats.values has shape \(0,\), expected one row"),
        (lambda: t_interval([1, 2], 95), "stats.level is 95, expected a probability"),
        (lambda: paired_ratio_interval([1], [1, 2]), "stats.numerators has 1 values, expected 2"),
        (lambda: paired_ratio_interval([1, 1], [1, 0]), "stats.denominators has 0.0, expected positive"),
        (lambda: paired_ratio_interval([1, 0], [1, 1]), "stats.numerators has 0.0, expected positive"),
    ],
)
def test_a_wrong_question_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_importing_stats_loads_no_scipy():
    code = "import sys, spanlab.stats; sys.exit(any(name.startswith('scipy') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

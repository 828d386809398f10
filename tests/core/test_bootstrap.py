"""Cluster bootstrap against closed forms, and its coverage on data whose mean is known."""

import math

import numpy as np
import pytest

from spanlab.stats import (
    DRAWS,
    Clusters,
    block_estimates,
    describe_few,
    positive_ratio,
    positive_ratio_p,
    ratio,
    ratio_error,
    share,
    t_quantile,
)

ONES = np.ones


def test_sums_are_by_seed_and_group():
    clusters = Clusters.of(np.array([7, 7, 9, 9]), np.array([3, 5, 5, 5]))
    assert (clusters.seeds, clusters.groups) == (2, 2)
    assert clusters.sums(np.array([1.0, 2.0, 3.0, 4.0])).tolist() == [[1, 2], [0, 7]]


def test_one_level_is_the_standard_error_of_a_mean():
    """Of n equal clusters the bootstrap variance of their mean is s² / n, s with n - 1."""
    values = np.random.default_rng(3).normal(10, 2, (1, 40))
    error = ratio_error(values, ONES((1, 40)))
    exact = values.std(ddof=1) / math.sqrt(40)
    # a variance of 1000 draws: relative standard deviation sqrt(2 / 1000), and half of it for its root
    assert error.size == pytest.approx(exact, rel=3.29 * math.sqrt(2 / DRAWS) / 2)
    assert error.degrees == 39


def test_few_clusters_widen_the_bootstrap():
    """The plain bootstrap variance of three clusters is two thirds of s² / n: the error would be 18 % too small."""
    error = ratio_error(np.array([[1.0, 2.0, 6.0]]), ONES((1, 3)))
    assert error.size == pytest.approx(math.sqrt(7 / 3), rel=3.29 * math.sqrt(2 / DRAWS) / 2)


def test_few_blocks_widen_the_bootstrap():
    """Of two blocks with means 0 and 1 the error of the mean is s / sqrt(2) = 1 / 2, and not 1 / sqrt(8)."""
    error = block_estimates(np.repeat([0.0, 1.0], 10))["mean"].error
    assert error == pytest.approx(0.5, rel=3.29 * math.sqrt(2 / DRAWS) / 2)


def test_crossed_levels_add_their_variances():
    rng = np.random.default_rng(4)
    table = 50 + 3 * rng.normal(size=(6, 1)) + 5 * rng.normal(size=(1, 30))
    error = ratio_error(table, ONES((6, 30)))
    parts = [table.mean(1).var(ddof=1) / 6, table.mean(0).var(ddof=1) / 30]
    assert error.size == pytest.approx(math.sqrt(sum(parts)), rel=3.29 * math.sqrt(2 / DRAWS) / 2)
    degrees = sum(parts) ** 2 / (parts[0] ** 2 / 5 + parts[1] ** 2 / 29)
    assert error.degrees == pytest.approx(degrees, rel=0.2)


def covered(seeds: int, groups: int, tables: int = 600) -> float:
    """How often an interval holds the true mean of lognormal seed, group and request effects."""
    rng = np.random.default_rng([seeds, groups])
    spreads = (0.15, 0.4, 0.3)
    truth = math.exp(sum(spread**2 for spread in spreads) / 2)
    hits = 0
    for _ in range(tables):
        sizes = [(seeds, 1, 1), (1, groups, 1), (seeds, groups, 5)]
        effects = [s * rng.normal(size=size) for s, size in zip(spreads, sizes, strict=True)]
        values = np.exp(sum(effects)).sum(axis=2)
        found = positive_ratio(values, 5 * ONES(values.shape))
        hits += found.low <= truth <= found.high
    return hits / tables


@pytest.mark.parametrize(("seeds", "groups"), [(3, 48), (5, 48), (5, 12), (10, 30)])
def test_intervals_cover_seeds_and_groups(seeds: int, groups: int):
    """Within 2 points of 95 %, beyond what 600 tables can tell at 99.9 %."""
    noise = 3.29 * math.sqrt(0.95 * 0.05 / 600)
    assert 0.93 - noise <= covered(seeds, groups) <= 0.97 + noise


def documents_by_hand(above: np.ndarray, below: np.ndarray, size: float) -> tuple[float, float]:
    """Skewness of the estimate and T² coefficient of the transform, from moments of the documents' influence."""
    count, value = above.size, above.sum() / below.sum()
    influence = [(a - value * b) / below.mean() for a, b in zip(above, below, strict=True)]
    spread = math.sqrt(sum(x**2 for x in influence) / (count - 1))
    cubes = sum((x / spread) ** 3 for x in influence) * count / ((count - 1) * (count - 2))
    skewness = cubes / math.sqrt(count)
    moved = sum(x * (b / below.mean() - 1) for x, b in zip(influence, below, strict=True)) / (count - 1) / count
    return skewness, skewness / 3 - moved / size


def test_skewed_ends_are_quantiles_of_the_transform():
    """T + b T² + b² T³ / 3 + a / 6 is ± t at the ends, for the statistic T of either end."""
    rng = np.random.default_rng(7)
    for _ in range(20):
        below = rng.gamma(3.0, 1.0, 15)
        above = below * np.exp(rng.normal(size=15))
        interval, error = ratio(above[None], below[None]), ratio_error(above[None], below[None])
        a, b = documents_by_hand(above, below, error.size)
        for end, sign in ((interval.low, 1), (interval.high, -1)):
            statistic = (interval.mean - end) / error.size
            transformed = statistic + b * statistic**2 + b**2 * statistic**3 / 3 + a / 6
            assert transformed == pytest.approx(sign * t_quantile(0.975, 14), rel=1e-9)


def test_symmetric_values_have_student_t():
    values = np.array([[1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]])
    interval, error = ratio(values, ONES((1, 11))), ratio_error(values, ONES((1, 11)))
    assert interval.high - 6 == pytest.approx(6 - interval.low)
    assert interval.high - 6 == pytest.approx(t_quantile(0.975, 10) * error.size)


def test_few_clusters_have_no_skewness():
    interval = ratio(np.array([[0.0] * 8 + [9.0]]), ONES((1, 9)))
    assert interval.high - 1 == pytest.approx(1 - interval.low)


def test_skewed_means_are_missed_on_both_sides():
    """Of 25 documents with 4 lognormal questions, Student's t lies below the truth in 7 % of studies."""
    rng, missed = np.random.default_rng(0), [0, 0]
    for _ in range(1000):
        values = np.exp(0.5 * rng.normal(size=(1, 25, 1)) + 0.5 * rng.normal(size=(1, 25, 4))).sum(2)
        _, low, high = ratio(values, 4 * ONES((1, 25)))
        missed[0] += high < math.exp(0.25)
        missed[1] += low > math.exp(0.25)
    assert missed[0] <= 55
    assert sum(missed) <= 75


def test_a_p_value_is_that_of_the_interval():
    """At an end of the interval, the p value is 5 %."""
    table = 1 + np.random.default_rng(9).exponential(size=(3, 20))
    interval = positive_ratio(table, ONES(table.shape))
    for end in (interval.low, interval.high):
        assert positive_ratio_p(table, ONES(table.shape), end) == pytest.approx(0.05, rel=1e-6)
    assert positive_ratio_p(table, table, 1.0) == 1.0
    assert positive_ratio_p(2 * table, table, 1.0) == 0.0
    assert math.isnan(positive_ratio_p(ONES((1, 1)), ONES((1, 1)), 1.0))


@pytest.mark.parametrize(
    ("seeds", "groups", "named"),
    [(5, 30, ""), (1, 30, ""), (5, 1, ""), (3, 30, "over 3 seeds"), (1, 9, "over 9 groups"), (2, 6, "6 groups (doc")],
)
def test_intervals_over_few_clusters_have_a_caveat(seeds: int, groups: int, named: str):
    caveat = describe_few(seeds, groups)
    assert (caveat is None) == (not named)
    assert named in (caveat or "")


def test_a_ratio_never_has_a_negative_end():
    rng = np.random.default_rng(6)
    for _ in range(200):
        slow, fast = rng.pareto(1.1, (3, 4)) + 0.01, rng.pareto(1.1, (3, 4)) + 0.01
        interval = positive_ratio(slow, fast)
        assert 0 <= interval.low <= interval.mean <= interval.high


def test_equal_arms_have_a_ratio_of_one_without_width():
    table = np.random.default_rng(1).exponential(size=(3, 9))
    assert positive_ratio(table, table) == pytest.approx((1.0, 1.0, 1.0))


def test_shares_stay_between_zero_and_one():
    reused, prompt = np.array([[0.0, 0.0, 10.0]]), np.array([[10.0, 10.0, 10.0]])
    interval = share(reused, prompt)
    assert interval.mean == pytest.approx(1 / 3)
    assert interval.low == 0.0
    assert interval.high <= 1.0
    assert share(prompt, prompt) == (1.0, 1.0, 1.0)


def test_one_seed_and_one_group_have_no_interval():
    assert positive_ratio(ONES((1, 1)), ONES((1, 1))) == (1.0, None, None)
    assert share(ONES((1, 1)), ONES((1, 1))) == (1.0, None, None)


def test_the_same_table_gives_the_same_interval():
    table = np.random.default_rng(2).exponential(size=(3, 9))
    assert positive_ratio(table, ONES(table.shape)) == positive_ratio(table, ONES(table.shape))

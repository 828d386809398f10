"""Intervals that cover workload and arrivals: cluster bootstrap over groups of requests and seeds."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spanlab.stats import Interval, t_quantile, two_sided_p

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DRAWS = 1000
SKEWED = 10  #: clusters from which their skewness can be estimated
LEAST_SEEDS, LEAST_GROUPS = 4, 10  #: fewer seeds or groups, but more than one, give intervals that are too narrow
_SEED = 20240229


@dataclass(frozen=True)
class Clusters:
    """Requests by seed and by group; a group has the requests of one document, in every seed.

    seed, group  indices from 0, shape (n,)
    seeds, groups  numbers of seeds and groups
    """

    seed: Ints
    group: Ints
    seeds: int
    groups: int

    @staticmethod
    def of(seeds: Ints, groups: Ints) -> Clusters:
        """Return clusters of requests with these seeds and group ids, both of shape (n,)."""
        seed_values, seed = np.unique(seeds, return_inverse=True)
        group_values, group = np.unique(groups, return_inverse=True)
        return Clusters(seed, group, len(seed_values), len(group_values))

    def sums(self, values: NDArray[np.floating] | Ints) -> Floats:
        """Return sums of `values`, shape (n,), by seed and group, shape (seeds, groups)."""
        cells = self.seed * self.groups + self.group
        flat = np.bincount(cells, values, self.seeds * self.groups)
        return flat.reshape(self.seeds, self.groups).astype(np.float64, copy=False)


@dataclass(frozen=True)
class Error:
    """Standard error of an estimate, its degrees of freedom, and the skewness of the clusters.

    `skewness`  third cumulant of the estimate ÷ size³
    `bend`      coefficient of T² in `_studentised`
    """

    size: float
    degrees: float
    skewness: float = 0.0
    bend: float = 0.0


@dataclass(frozen=True)
class _Level:
    """One level of clusters: what it adds to the variance and the third cumulant of an estimate.

    `covariance`  of the numerators' errors and the denominators, relative to the estimate and to the mean denominator
    """

    variance: float
    degrees: int
    third: float = 0.0
    covariance: float = 0.0


def ratio_error(above: Floats, below: Floats) -> Error | None:
    """Return the standard error of sum(above) ÷ sum(below), both of shape (seeds, groups).

    Seeds redraw the arrivals of the same groups, so both levels are crossed: each is resampled
    separately with replacement and the variances are added. This counts their interaction twice and
    is therefore never too small on that account (Owen, Annals of Applied Statistics 2007). A
    bootstrap variance of k clusters is too small by (k - 1) / k (Hesterberg, American Statistician
    2015) and is multiplied by its inverse. Degrees of freedom are Satterthwaite's. A level of one
    cluster is left out; None where both have one. The effect of a document on the waiting of others
    is not resampled.
    """
    value = float(above.sum() / below.sum())
    sums = [(above.sum(1), below.sum(1)), (above.sum(0), below.sum(0))]
    levels = [_level(*level, value) for level in sums if len(level[0]) > 1]
    if not levels:
        return None
    variance = sum(level.variance for level in levels)
    if variance == 0:
        return Error(0.0, min(level.degrees for level in levels))
    fourth = sum(level.variance**2 / level.degrees for level in levels)
    size = math.sqrt(variance)
    skewness = sum(level.third for level in levels) / size**3
    bend = skewness / 3 - sum(level.covariance for level in levels) / size
    return Error(size, variance**2 / fourth, skewness, bend)


def _level(above: Floats, below: Floats, value: float) -> _Level:
    """Return the bootstrap variance of sum(above) ÷ sum(below) over k clusters, shape (k,), and its third cumulant."""
    count = len(above)
    weights = drawn_counts(count)
    bottom = weights @ below
    ratios = (weights @ above)[bottom > 0] / bottom[bottom > 0]
    variance = float(ratios.var()) * count / (count - 1)
    influence = (above - value * below) / below.mean()
    squares = float((influence**2).mean())
    if count < SKEWED or squares == 0:
        return _Level(variance, count - 1)
    skewness = float((influence**3).mean()) / squares**1.5 * math.sqrt(count * (count - 1)) / (count - 2)
    covariance = float(influence @ (below / below.mean() - 1)) / (count * (count - 1))
    return _Level(variance, count - 1, skewness * variance**1.5 / math.sqrt(count), covariance)


@functools.cache
def drawn_counts(count: int) -> Floats:
    """Return how often each draw takes each of `count` clusters, shape (draws, count); fixed random seed."""
    rng = np.random.default_rng([_SEED, count])
    drawn = rng.multinomial(count, np.full(count, 1 / count), DRAWS)
    return drawn.astype(np.float64)


def positive_ratio(above: Floats, below: Floats) -> Interval:
    """Return the interval of sum(above) ÷ sum(below) for a positive quantity, such as a time or a speedup.

    On the log scale, by the delta method: estimate · exp(± t · error / estimate), so that no end is negative. The scale
    takes account of skewness.
    """
    value = float(above.sum() / below.sum())
    error = ratio_error(above, below)
    if error is None or value == 0:
        return Interval(value, None, None)
    factor = math.exp(min(_quantile(error) * error.size / value, 700.0))
    return Interval(value, value / factor, value * factor)


def positive_ratio_p(above: Floats, below: Floats, null: float) -> float:
    """Return the two-sided p value of a ratio of `null`, by the interval of `positive_ratio`; NaN where it has none."""
    value = float(above.sum() / below.sum())
    error = ratio_error(above, below)
    if error is None or value == 0:
        return math.nan
    if error.size == 0:
        return float(value == null)
    return two_sided_p(math.log(value / null) * value / error.size, error.degrees)


def ratio(above: Floats, below: Floats) -> Interval:
    """Return the interval of sum(above) ÷ sum(below) for a quantity of any sign: estimate - T · error.

    T is the statistic whose transform is ± t, so that the interval reaches further to the side of the long tail.
    """
    value = float(above.sum() / below.sum())
    error = ratio_error(above, below)
    if error is None:
        return Interval(value, None, None)
    low, high = (value - error.size * _studentised(error, sign * _quantile(error)) for sign in (1, -1))
    return Interval(value, low, high)


def share(above: Floats, below: Floats) -> Interval:
    """Return the interval of sum(above) ÷ sum(below) for a share: as `ratio`, clipped to 0 to 1."""
    return ratio(above, below).clipped()


def _studentised(error: Error, normal: float) -> float:
    """Return T = (estimate - truth) ÷ error whose transform T + b T² + b² T³ / 3 + a / 6 is `normal`.

    Of a mean of skewed values, T itself is skewed to the other side: it is the ratio of two correlated quantities. With
    a = skewness and b = a / 3 the transform is free of skewness to first order, and monotone (Hall, Journal of the
    Royal Statistical Society B 1992). Of a ratio, the error also moves with the estimate, by the covariance of its
    numerators' errors and its denominators. That adds to T's coefficient of T², and is subtracted from b.
    """
    shifted = normal - error.skewness / 6
    if abs(error.bend) < 1e-9:
        return shifted
    return (math.cbrt(1 + 3 * error.bend * shifted) - 1) / error.bend


def _quantile(error: Error) -> float:
    """Return the quantile of Student's t for a 95 % interval."""
    return t_quantile(0.975, error.degrees)


def describe_few(seeds: int, groups: int) -> str | None:
    """Return a caveat for intervals over too few seeds or groups; None where there are enough, or one, of both."""
    few = [f"{groups} groups (documents)"] * (1 < groups < LEAST_GROUPS)
    few += [f"{seeds} seeds (arrivals)"] * (1 < seeds < LEAST_SEEDS)
    if not few:
        return None
    return (
        f"95 % intervals over {' and '.join(few)} are too narrow: with fewer than {LEAST_GROUPS} groups or "
        f"{LEAST_SEEDS} seeds they contain the true value in as few as 87 % of studies"
    )

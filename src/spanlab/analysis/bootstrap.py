"""Intervals that cover workload and arrivals: cluster bootstrap over groups of requests and seeds."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spanlab.stats import Interval, t_quantile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DRAWS = 1000
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
    """Standard error of an estimate, and its degrees of freedom."""

    size: float
    degrees: float


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
    levels = [(above.sum(1), below.sum(1)), (above.sum(0), below.sum(0))]
    variances = [_variance(*level) for level in levels if len(level[0]) > 1]
    if not variances:
        return None
    variance = sum(term.size for term in variances)
    if variance == 0:
        return Error(0.0, min(term.degrees for term in variances))
    fourth = sum(term.size**2 / term.degrees for term in variances)
    return Error(math.sqrt(variance), variance**2 / fourth)


def _variance(above: Floats, below: Floats) -> Error:
    """Return the bootstrap variance of sum(above) ÷ sum(below) over k clusters, shape (k,)."""
    count = len(above)
    weights = drawn_counts(count)
    bottom = weights @ below
    ratios = (weights @ above)[bottom > 0] / bottom[bottom > 0]
    return Error(float(ratios.var()) * count / (count - 1), count - 1)


@functools.cache
def drawn_counts(count: int) -> Floats:
    """Return how often each draw takes each of `count` clusters, shape (draws, count); fixed random seed."""
    rng = np.random.default_rng([_SEED, count])
    drawn = rng.multinomial(count, np.full(count, 1 / count), DRAWS)
    return drawn.astype(np.float64)


def positive_ratio(above: Floats, below: Floats) -> Interval:
    """Return the interval of sum(above) ÷ sum(below) for a positive quantity, such as a time or a speedup.

    On the log scale, by the delta method: estimate · exp(± t · error / estimate), so that no end is negative.
    """
    value = float(above.sum() / below.sum())
    error = ratio_error(above, below)
    if error is None or value == 0:
        return Interval(value, None, None)
    factor = math.exp(min(_half_width(error) / value, 700.0))
    return Interval(value, value / factor, value * factor)


def ratio(above: Floats, below: Floats) -> Interval:
    """Return the interval of sum(above) ÷ sum(below) for a quantity of any sign: estimate ± t · error."""
    value = float(above.sum() / below.sum())
    error = ratio_error(above, below)
    if error is None:
        return Interval(value, None, None)
    half = _half_width(error)
    return Interval(value, value - half, value + half)


def share(above: Floats, below: Floats) -> Interval:
    """Return the interval of sum(above) ÷ sum(below) for a share: estimate ± t · error, clipped to 0 to 1."""
    return ratio(above, below).clipped()


def _half_width(error: Error) -> float:
    """Return half the width of a 95 % interval."""
    return t_quantile(0.975, error.degrees) * error.size

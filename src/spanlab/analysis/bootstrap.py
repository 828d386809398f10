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
    """Requests by seed and by group: a group holds the requests of one document, in every seed.

    seed, group  indices from 0, shape (n,)
    seeds, groups  how many there are
    """

    seed: Ints
    group: Ints
    seeds: int
    groups: int

    @staticmethod
    def of(seeds: Ints, groups: Ints) -> Clusters:
        """Clusters of requests with these seeds and group ids, shape (n,)."""
        own, seed = np.unique(seeds, return_inverse=True)
        kinds, group = np.unique(groups, return_inverse=True)
        return Clusters(seed, group, len(own), len(kinds))

    def sums(self, values: NDArray[np.floating] | Ints) -> Floats:
        """Sums of `values`, shape (n,), by seed and group, shape (seeds, groups)."""
        cells = self.seed * self.groups + self.group
        flat = np.bincount(cells, values, self.seeds * self.groups)
        return flat.reshape(self.seeds, self.groups).astype(np.float64, copy=False)


@dataclass(frozen=True)
class Error:
    """Standard error of an estimate, and the degrees of freedom with which it is known."""

    size: float
    degrees: float


def ratio_error(above: Floats, below: Floats) -> Error | None:
    """Standard error of sum(above) ÷ sum(below), both of shape (seeds, groups).

    Seeds redraw the arrivals of the same groups, so both are crossed: each is resampled by itself
    with replacement and the variances are added, which counts their interaction twice and so is
    never too small on that account (Owen, Annals of Applied Statistics 2007). A bootstrap variance
    of k clusters is too small by (k - 1) / k (Hesterberg, American Statistician 2015) and is
    multiplied by its inverse. Degrees of freedom are Satterthwaite's. A level of one cluster says
    nothing; None where both have one. What a document does to the waiting of others is not redone.
    """
    levels = [(above.sum(1), below.sum(1)), (above.sum(0), below.sum(0))]
    parts = [_variance(*level) for level in levels if len(level[0]) > 1]
    if not parts:
        return None
    variance = sum(part.size for part in parts)
    if variance == 0:
        return Error(0.0, min(part.degrees for part in parts))
    fourth = sum(part.size**2 / part.degrees for part in parts)
    return Error(math.sqrt(variance), variance**2 / fourth)


def _variance(above: Floats, below: Floats) -> Error:
    """Bootstrap variance of sum(above) ÷ sum(below) over k clusters, shape (k,)."""
    count = len(above)
    weights = drawn_counts(count)
    bottom = weights @ below
    ratios = (weights @ above)[bottom > 0] / bottom[bottom > 0]
    return Error(float(ratios.var()) * count / (count - 1), count - 1)


@functools.cache
def drawn_counts(count: int) -> Floats:
    """How often each of `count` clusters is drawn, shape (draws, count); the same in every study."""
    rng = np.random.default_rng([_SEED, count])
    drawn = rng.multinomial(count, np.full(count, 1 / count), DRAWS)
    return drawn.astype(np.float64)


def positive_ratio(above: Floats, below: Floats) -> Interval:
    """Interval of sum(above) ÷ sum(below), a positive quantity: time, speedup. Never a negative end.

    On the log scale, by the delta method: estimate · exp(± t · error / estimate).
    """
    value = float(above.sum() / below.sum())
    error = ratio_error(above, below)
    if error is None or value == 0:
        return Interval(value, None, None)
    factor = math.exp(min(_reach(error) / value, 700.0))
    return Interval(value, value / factor, value * factor)


def ratio(above: Floats, below: Floats) -> Interval:
    """Interval of sum(above) ÷ sum(below), of any sign: estimate ± t · error."""
    value = float(above.sum() / below.sum())
    error = ratio_error(above, below)
    if error is None:
        return Interval(value, None, None)
    half = _reach(error)
    return Interval(value, value - half, value + half)


def share(above: Floats, below: Floats) -> Interval:
    """Interval of sum(above) ÷ sum(below), a share between 0 and 1: estimate ± t · error, cut there."""
    value, low, high = ratio(above, below)
    if low is None or high is None:
        return Interval(value, None, None)
    return Interval(value, max(low, 0.0), min(high, 1.0))


def _reach(error: Error) -> float:
    """Half the width of a 95 % interval."""
    return t_quantile(0.975, error.degrees) * error.size

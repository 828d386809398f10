"""Intervals of paired ratios over questions that share documents: a cluster bootstrap."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spanlab.stats import Interval

Floats = NDArray[np.float64]
Groups = NDArray[np.int64]

_RESAMPLES = 2000
_SEED = 20261122


def mean_interval(values: Floats, groups: Groups) -> Interval:
    """Mean of values, shape (questions,), with a 95 % interval; `groups` as for `ratio_interval`."""
    return ratio_interval(values, np.ones(len(values)), groups)


def ratio_interval(above: Floats, below: Floats, groups: Groups, level: float = 0.95) -> Interval:
    """sum(above) ÷ sum(below) over questions, both of shape (questions,), with its BCa interval (Efron 1987).

    `groups`  the document of each question. Questions of one document share passages and are not independent, so that
              whole documents are drawn with replacement, and both sums are taken over the same draw

    No bounds where there is one document alone. Where all draws give one ratio, the bounds are that ratio.
    """
    _, at = np.unique(groups, return_inverse=True)
    sums = np.bincount(at, above), np.bincount(at, below)
    value = float(sums[0].sum() / sums[1].sum())
    if len(sums[0]) < 2:
        return Interval(value, None, None)
    if np.allclose(sums[0], value * sums[1], rtol=1e-12, atol=0.0):
        return Interval(value, value, value)
    from scipy.stats import bootstrap  # here, since only those who ask pay for SciPy

    rng = np.random.default_rng(_SEED)
    options = {"paired": True, "vectorized": True, "n_resamples": _RESAMPLES, "confidence_level": level, "rng": rng}
    found = bootstrap(sums, _ratio, method="BCa", **options).confidence_interval
    return Interval(value, float(found.low), float(found.high))


def separated(difference: Interval) -> bool:
    """Whether the interval of a difference leaves zero out; a difference of which it does not is not shown."""
    low, high = difference.low, difference.high
    return low is not None and high is not None and (low > 0 or high < 0)


def _ratio(above: Floats, below: Floats, axis: int) -> Floats:
    ratio: Floats = above.sum(axis) / below.sum(axis)
    return ratio

"""Intervals of paired ratios over questions that share documents."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from spanlab.analysis.bootstrap import Clusters, positive_ratio, ratio, share
from spanlab.stats import Interval

Floats = NDArray[np.float64]
Groups = NDArray[np.int64]
Kind = Callable[[Floats, Floats], Interval]

#: Interval functions by kind of quantity: of any sign, never negative, between 0 and 1.
SIGNED: Kind = ratio
POSITIVE: Kind = positive_ratio
SHARE: Kind = share


def mean_interval(values: Floats, groups: Groups, kind: Kind = SIGNED) -> Interval:
    """Return the mean of values, shape (questions,), with a 95 % interval; other parameters as in `ratio_interval`."""
    return ratio_interval(values, np.ones(len(values)), groups, kind)


def ratio_interval(above: Floats, below: Floats, groups: Groups, kind: Kind = SIGNED) -> Interval:
    """Return sum(above) ÷ sum(below) over questions, both of shape (questions,), with a 95 % interval.

    `groups`  the document of each question. Questions of one document share passages and are not independent, so
              whole documents are drawn with replacement, and both sums are taken over the same draw

    Bounds use t quantiles of the bootstrap's standard error, and the skewness of the documents (`analysis.bootstrap`;
    coverage: benchmarks/coverage). One document gives no bounds.
    """
    clusters = Clusters.of(np.zeros(len(groups), np.int64), groups)
    return kind(clusters.sums(above), clusters.sums(below))


def separated(difference: Interval) -> bool:
    """Return whether the interval of a difference excludes zero, so that the difference is shown."""
    low, high = difference.low, difference.high
    return low is not None and high is not None and (low > 0 or high < 0)

"""Confidence intervals, tests of several hypotheses, and percentiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = Sequence[float] | NDArray[np.floating] | NDArray[np.integer]


class Interval(NamedTuple):
    """A mean and its confidence bounds; the bounds are None for a single value."""

    mean: float
    low: float | None
    high: float | None

    @property
    def ends(self) -> tuple[float, float] | None:
        """Both bounds; None where either is missing."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def clipped(self) -> Interval:
        """Return the interval of a share: its bounds clipped to 0 to 1."""
        ends = self.ends
        return Interval(self.mean, max(ends[0], 0.0), min(ends[1], 1.0)) if ends else self


def t_interval(values: Values, level: float = 0.95) -> Interval:
    """Mean and two-sided Student t interval: mean ± t(n − 1, (1 + level) / 2) · s / √n, s with n − 1.

    Values must be independent, as one per seed is.
    """
    sample = _sample("values", values)
    if not 0 < level < 1:
        raise ValueError(f"stats.level is {level}, expected a probability between 0 and 1.")
    mean = float(sample.mean())
    if sample.size < 2:
        return Interval(mean, None, None)
    half = t_quantile((1 + level) / 2, sample.size - 1) * float(sample.std(ddof=1)) / math.sqrt(sample.size)
    return Interval(mean, mean - half, mean + half)


def t_test(values: Values) -> float:
    """Two-sided p value of a mean of zero by Student's t; NaN for one value, equal values leave no doubt."""
    sample = _sample("values", values)
    if sample.size < 2:
        return math.nan
    error = float(sample.std(ddof=1)) / math.sqrt(sample.size)
    mean = float(sample.mean())
    if error <= 1e-12 * abs(mean):
        return 0.0 if mean else 1.0
    return two_sided_p(mean / error, sample.size - 1)


def two_sided_p(statistic: float, degrees: float) -> float:
    """Probability that Student's t with `degrees` degrees of freedom is as far from zero as `statistic`."""
    from scipy.special import stdtr  # as in `t_quantile`

    return 2 * float(stdtr(degrees, -abs(statistic)))


def holm(p_values: Sequence[float], level: float = 0.05) -> list[bool]:
    """Whether each hypothesis is rejected; the probability of any false rejection is at most `level` (Holm 1979).

    The i-th smallest of m values is compared with level / (m - i + 1), up to the first that is not below. NaN, as of a
    test without data, counts among the m and is never rejected.
    """
    order = sorted(range(len(p_values)), key=lambda index: (math.isnan(p_values[index]), p_values[index]))
    rejected = [False] * len(p_values)
    for rank, index in enumerate(order):
        if not p_values[index] < level / (len(order) - rank):
            break
        rejected[index] = True
    return rejected


def t_quantile(probability: float, degrees: float) -> float:
    """Quantile of Student's t distribution with `degrees` degrees of freedom."""
    # Here and not above: most users of this module never need SciPy, and scipy.stats would cost half a second.
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))


def paired_ratio_interval(numerators: Values, denominators: Values) -> Interval:
    """Geometric mean of the ratios numerators[i] / denominators[i], with the 95 % t interval of their logarithms.

    Pairs share their noise, which divides out. No end of the interval is negative.
    """
    above, below = _sample("numerators", numerators), _sample("denominators", denominators)
    if above.shape != below.shape:
        raise ValueError(f"stats.numerators has {above.size} values, expected {below.size} as denominators has.")
    for key, values in (("numerators", above), ("denominators", below)):
        if not (values > 0).all():
            raise ValueError(f"stats.{key} has {values.min()}, expected positive values.")
    mean, *ends = t_interval(np.log(above / below))
    low, high = (None if end is None else math.exp(end) for end in ends)
    return Interval(math.exp(mean), low, high)


def percentile(values: Values, percent: float) -> float:
    """Percentile by linear interpolation between order statistics, position (n − 1) · percent / 100 counted from 0."""
    return float(np.percentile(_sample("values", values), percent, method="linear"))


def _sample(key: str, values: Values) -> NDArray[np.float64]:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or not sample.size:
        raise ValueError(f"stats.{key} has shape {sample.shape}, expected one row of at least one value.")
    return sample

"""Uncertainty of quality over prompts: bootstrap means, exact shares, McNemar's paired test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spanlab.stats import Interval, Values

_RESAMPLES = 4000
_AT_ONCE = 1 << 22  # drawn values held in memory at a time


def bootstrap_interval(values: Values, level: float = 0.95, seed: int = 0) -> Interval:
    """Mean and percentile-bootstrap interval (Efron 1979) of independent values: one per prompt, not per token.

    For what is skewed and never negative, such as KL, where a t interval would reach below zero. Without bounds for
    one value; the same seed gives the same bounds.
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or not sample.size or not np.isfinite(sample).all():
        raise ValueError(f"values={values}: expected one row of at least one finite number")
    _check_level(level)
    mean = float(sample.mean())
    if sample.size == 1:
        return Interval(mean, None, None)
    low, high = np.quantile(_resampled_means(sample, seed), [(1 - level) / 2, (1 + level) / 2]).tolist()
    return Interval(mean, low, high)


def share_interval(right: int, of: int, level: float = 0.95) -> Interval:
    """Share and its exact binomial interval (Clopper-Pearson 1934): never of no width, even at 0 or all right."""
    from scipy.special import betaincinv  # here, since only those who ask pay for SciPy

    if not 0 <= right <= of or of < 1:
        raise ValueError(f"right={right}: expected 0 to {of}, out of at least one")
    _check_level(level)
    tail = (1 - level) / 2
    low = float(betaincinv(right, of - right + 1, tail)) if right else 0.0
    high = float(betaincinv(right + 1, of - right, 1 - tail)) if right < of else 1.0
    return Interval(right / of, low, high)


@dataclass(frozen=True, slots=True)
class McNemar:
    """Prompts that only one of two arms got right, and how likely so uneven a split is if both are equally good."""

    only_first: int
    only_second: int
    p_value: float


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> McNemar:
    """Exact two-sided McNemar test of two arms on the same prompts: min(1, 2 · P(X ≤ min(b, c))), X ~ Bin(b + c, ½).

    Prompts that both got right, or both wrong, say nothing; without any others the p value is 1.
    """
    from scipy.special import bdtr

    if len(first) != len(second):
        raise ValueError(f"second has {len(second)} prompts, expected {len(first)} as first has")
    only_first = sum(a and not b for a, b in zip(first, second, strict=True))
    only_second = sum(b and not a for a, b in zip(first, second, strict=True))
    rarer, both = min(only_first, only_second), only_first + only_second
    return McNemar(only_first, only_second, min(1.0, 2 * float(bdtr(rarer, both, 0.5))))


def _resampled_means(sample: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    rows = max(1, _AT_ONCE // sample.size)
    parts = [min(rows, _RESAMPLES - start) for start in range(0, _RESAMPLES, rows)]
    return np.concatenate([rng.choice(sample, (part, sample.size)).mean(axis=1) for part in parts])


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level={level}: expected a probability between 0 and 1")

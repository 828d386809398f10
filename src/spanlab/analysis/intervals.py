"""Uncertainty of right answers over prompts: exact intervals of shares, and McNemar's test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spanlab.stats import Interval


def share_interval(right: int, total: int, level: float = 0.95) -> Interval:
    """Return a share and its exact binomial interval (Clopper-Pearson 1934), which has a width even for 0 or 1."""
    from scipy.special import betaincinv  # slow to import, and rarely needed

    if not 0 <= right <= total or total < 1:
        raise ValueError(f"right={right}: expected 0 to {total}, out of at least one")
    _check_level(level)
    tail = (1 - level) / 2
    low = float(betaincinv(right, total - right + 1, tail)) if right else 0.0
    high = float(betaincinv(right + 1, total - right, 1 - tail)) if right < total else 1.0
    return Interval(right / total, low, high)


@dataclass(frozen=True, slots=True)
class McNemar:
    """Prompts that only one of two arms got right, and the p value of this split for equally good arms."""

    only_first: int
    only_second: int
    p_value: float


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> McNemar:
    """Exact two-sided McNemar test of two arms on the same prompts: min(1, 2 · P(X ≤ min(b, c))), X ~ Bin(b + c, ½).

    Prompts that both got right, or both wrong, are ignored; without any others the p value is 1.
    """
    from scipy.special import bdtr

    if len(first) != len(second):
        raise ValueError(f"second has {len(second)} prompts, expected {len(first)} as first has")
    only_first = sum(a and not b for a, b in zip(first, second, strict=True))
    only_second = sum(b and not a for a, b in zip(first, second, strict=True))
    rarer, both = min(only_first, only_second), only_first + only_second
    return McNemar(only_first, only_second, min(1.0, 2 * float(bdtr(rarer, both, 0.5))))


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level={level}: expected a probability between 0 and 1")

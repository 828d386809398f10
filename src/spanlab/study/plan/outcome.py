"""The outcome of one point over its runs: intervals, and whether they meet the targets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from spanlab.settings.slo import Target
from spanlab.stats import Interval, t_quantile
from spanlab.study.plan.point import Point, RunResult

_LEVEL = 0.975  # upper probability of a two-sided 95 % interval


@dataclass(frozen=True)
class Outcome:
    """The outcome of a point over its runs.

    `drawn`  whether arrivals are independent draws; otherwise all runs share one recorded sample path
    """

    point: Point
    targets: Sequence[Target]
    runs: Sequence[RunResult]
    drawn: bool

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """95 % intervals of the targets' statistics, by key."""
        return {target.key: self._interval(target) for target in self.targets}

    def _interval(self, target: Target) -> Interval:
        """Return Student's t interval over draws; for one sample path, from errors of bootstrap and shakes, added.

        Degrees of freedom are Satterthwaite's. Without an error, for example for very few requests, there are no ends.
        A lower end below zero is not cut, because it shows that the runs hardly determine the statistic.
        """
        by_run = [run["estimates"][target.delay] for run in self.runs]
        if None in by_run:
            raise ValueError(f"slo.{target.key}={target.limit_s}: expected a request with two output tokens or more")
        estimates = [statistics[target.statistic] for statistics in by_run]
        values = np.array([value for value, _ in estimates])
        variances = []
        if len(values) > 1:
            variances.append((float(values.var(ddof=1)) / len(values), len(values) - 1))
        if estimates[0][1] is not None and not (self.drawn and variances):
            variances.append((float(np.mean([error**2 for _, error in estimates])), self.runs[0]["blocks"] - 1))
        mean, half = float(values.mean()), _half_width(variances)
        return Interval(mean, None, None) if half is None else Interval(mean, mean - half, mean + half)

    @property
    def grows(self) -> bool:
        """Whether the queue grows in most runs, so that delays depend on the length of the run."""
        growing: int = sum(run["grows"] for run in self.runs)
        return growing > len(self.runs) / 2

    @property
    def meets(self) -> bool:
        """Whether the upper end of every target's interval is within the target, and no queue grows."""
        return not self.grows and all(self._ends(target)[1] <= target.limit_s for target in self.targets)

    @property
    def fails(self) -> bool:
        """Whether a miss is shown: a queue grows, or a whole interval lies above its target."""
        return self.grows or any(self._ends(target)[0] > target.limit_s for target in self.targets)

    @property
    def is_clear(self) -> bool:
        """Whether further runs are unnecessary: intervals three times as wide would give the same result."""
        ends = [(target.limit_s, *self._ends(target, 3)) for target in self.targets]
        misses = any(low > limit for limit, low, _ in ends)
        return misses or (not self.grows and all(high <= limit for limit, _, high in ends))

    def _ends(self, target: Target, times: float = 1) -> tuple[float, float]:
        """Return the ends of a target's interval, widened by `times`; without ends, its value twice."""
        mean, low, high = self.intervals[target.key]
        half = 0.0 if low is None or high is None else high - mean
        return mean - times * half, mean + times * half

    @property
    def worst(self) -> Target:
        """The target with the largest ratio of the interval's upper end to the limit."""
        return max(self.targets, key=lambda target: self._ends(target)[1] / target.limit_s)

    @property
    def distance(self) -> float:
        """The worst target's value as a multiple of its limit."""
        return max(self.intervals[target.key].mean / target.limit_s for target in self.targets)

    def mean(self, name: str) -> float | None:
        """Return the mean of a field over the runs; None where a run lacks it."""
        values = [run[name] for run in self.runs]
        return None if None in values else float(np.mean(values))

    def line(self) -> str:
        """Return the worst target and its state, as a line of progress."""
        state = "meets" if self.meets else "queue grows" if self.grows else "misses"
        return f"{self.worst.key} {self.intervals[self.worst.key].mean:.4g}, {state}"

    def summary(self) -> dict[str, Any]:
        """Return the entry of `summary.json`."""
        return {
            **{key: interval._asdict() for key, interval in self.intervals.items()},
            "meets": self.meets,
            "queue_grows": self.grows,
            **{name: self.mean(name) for name in ("token_hit_rate", "utilisation", "preemptions")},
        }


def _half_width(variances: Sequence[tuple[float, int]]) -> float | None:
    """Return half the width of an interval from variances and their degrees of freedom."""
    variance = sum(size for size, _ in variances)
    if not variances:
        return None
    if not variance:
        return 0.0
    degrees = variance**2 / sum(size**2 / degrees for size, degrees in variances)
    return t_quantile(_LEVEL, degrees) * math.sqrt(variance)

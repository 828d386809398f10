"""What the runs of one point say together: intervals, and whether they meet the targets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from spanlab.settings.slo import Target
from spanlab.stats import Interval, t_quantile
from spanlab.study.plan.point import Point, Served

_LEVEL = 0.975  # upper probability of a two-sided 95 % interval


@dataclass(frozen=True)
class Outcome:
    """The runs of a point.

    `drawn`  their arrivals are independent draws; otherwise all are one recorded sample path
    """

    point: Point
    targets: Sequence[Target]
    served: Sequence[Served]
    drawn: bool

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """95 % intervals of the targets' statistics, by key."""
        return {target.key: self._interval(target) for target in self.targets}

    def _interval(self, target: Target) -> Interval:
        """Student's t over draws; of one sample path the errors of the bootstrap and of the shakes, added.

        Degrees of freedom are Satterthwaite's. Without an error, as of very few requests, there are no ends.
        """
        found = [one["estimates"][target.delay] for one in self.served]
        if None in found:
            raise ValueError(f"slo.{target.key}={target.limit_s}: expected a request with two output tokens or more")
        estimates = [one[target.statistic] for one in found]
        values = np.array([value for value, _ in estimates])
        parts = []
        if len(values) > 1:
            parts.append((float(values.var(ddof=1)) / len(values), len(values) - 1))
        if estimates[0][1] is not None and not (self.drawn and parts):
            parts.append((float(np.mean([error**2 for _, error in estimates])), self.served[0]["blocks"] - 1))
        mean, half = float(values.mean()), _reach(parts)
        return Interval(mean, None, None) if half is None else Interval(mean, max(0.0, mean - half), mean + half)

    @property
    def grows(self) -> bool:
        """Whether the queue grows in most runs: then a delay tells how long the run was."""
        growing: int = sum(one["grows"] for one in self.served)
        return growing > len(self.served) / 2

    @property
    def meets(self) -> bool:
        """Whether the upper end of every target's interval is within the target, and no queue grows."""
        return not self.grows and all(self._upper(target) <= target.limit_s for target in self.targets)

    @property
    def fails(self) -> bool:
        """Whether that is shown: a queue grows, or an interval lies beyond its target as a whole."""
        return self.grows or any(self._lower(target) > target.limit_s for target in self.targets)

    @property
    def is_clear(self) -> bool:
        """Whether further runs would hardly change what is met: intervals three times as wide would not."""
        ends = [(target.limit_s, *self._ends(target, 3)) for target in self.targets]
        beyond = any(low > limit for limit, low, _ in ends)
        return beyond or (not self.grows and all(high <= limit for limit, _, high in ends))

    def _upper(self, target: Target) -> float:
        return self._ends(target)[1]

    def _lower(self, target: Target) -> float:
        return self._ends(target)[0]

    def _ends(self, target: Target, times: float = 1) -> tuple[float, float]:
        """Ends of a target's interval made wider; those of one without ends are its value."""
        mean, low, high = self.intervals[target.key]
        half = 0.0 if low is None or high is None else high - mean
        return mean - times * half, mean + times * half

    @property
    def worst(self) -> Target:
        """The target that is missed by most, or met by least."""
        return max(self.targets, key=lambda target: self._upper(target) / target.limit_s)

    @property
    def distance(self) -> float:
        """The worst target's value as a multiple of its limit."""
        return max(self.intervals[target.key].mean / target.limit_s for target in self.targets)

    def mean(self, name: str) -> float | None:
        """The mean over the runs of what each tells; None where one does not."""
        values = [one[name] for one in self.served]
        return None if None in values else float(np.mean(values))

    def line(self) -> str:
        """The worst target and what comes of it, for who waits."""
        state = "meets" if self.meets else "queue grows" if self.grows else "misses"
        return f"{self.worst.key} {self.intervals[self.worst.key].mean:.4g}, {state}"

    def summary(self) -> dict[str, Any]:
        """The point for `summary.json`."""
        return {
            **{key: interval._asdict() for key, interval in self.intervals.items()},
            "meets": self.meets,
            "queue_grows": self.grows,
            **{name: self.mean(name) for name in ("token_hit_rate", "utilisation", "preemptions")},
        }


def _reach(parts: Sequence[tuple[float, int]]) -> float | None:
    """Half the width of an interval by variances and their degrees of freedom."""
    variance = sum(size for size, _ in parts)
    if not parts:
        return None
    if not variance:
        return 0.0
    degrees = variance**2 / sum(size**2 / degrees for size, degrees in parts)
    return t_quantile(_LEVEL, degrees) * math.sqrt(variance)

"""Bars: limits that a measured number must meet, and the closed form of the expected prefix match."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """One measured number compared with its bar.

    `bar`     name of the bar
    `arm`     the arm that was measured
    `what`    description of the number, with its unit
    `value`   the measured value
    `least`, `most`  inclusive limits; None: no limit on that side. Without limits the number is only reported
    """

    bar: str
    arm: str
    what: str
    value: float
    least: float | None = None
    most: float | None = None

    @property
    def judged(self) -> bool:
        """Whether the number has a limit on either side."""
        return self.least is not None or self.most is not None

    @property
    def holds(self) -> bool:
        """Whether the number is within its limits."""
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    @property
    def limits(self) -> str:
        """The limits as a short text."""
        low, high = (None if end is None else f"{end:.4g}" for end in (self.least, self.most))
        if low is not None and high is not None:
            return low if low == high else f"{low} to {high}"
        return f"≥ {low}" if low is not None else f"≤ {high}" if high is not None else "reported"

    def sentence(self) -> str:
        """Return a sentence about a missed bar, with its numbers."""
        return f"bars.{self.bar}: {self.what} of {self.arm} is {self.value:.4g}, expected {self.limits}"

    def plain(self) -> dict[str, Any]:
        """Return the verdict as an entry of `summary.json`."""
        return asdict(self) | {"judged": self.judged, "holds": self.holds}


def verdict_of(entry: Mapping[str, Any]) -> Verdict:
    """Return the verdict of an entry of `summary.json`."""
    return Verdict(**{field.name: entry[field.name] for field in fields(Verdict)})


def expected_prefix(parts: int, part_tokens: int, earlier: int) -> float:
    """Return E[LCP] in tokens of a random order of `parts` equal parts with the closest of `earlier` random orders.

    The first j parts agree with one order with probability p_j = (parts − j)! ÷ parts!, and with at least one of n
    independent orders with 1 − (1 − p_j)^n; the expectation is the sum over j.
    """
    match_probabilities = [math.factorial(parts - j) / math.factorial(parts) for j in range(1, parts + 1)]
    return part_tokens * sum(1 - (1 - probability) ** earlier for probability in match_probabilities)

"""Bars that a measured number must clear, and closed forms of what a cache of prefixes can find."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """One number beside its bar.

    `bar`     name of the bar
    `arm`     the arm that was measured
    `what`    the number in words, with its unit
    `value`   what was measured
    `least`, `most`  the bar; None: no limit on this side, and where both are, the number is reported alone
    """

    bar: str
    arm: str
    what: str
    value: float
    least: float | None = None
    most: float | None = None

    @property
    def judged(self) -> bool:
        """Whether there is a bar."""
        return self.least is not None or self.most is not None

    @property
    def holds(self) -> bool:
        """Whether the number clears the bar."""
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    @property
    def words(self) -> str:
        """The bar in short words."""
        low, high = (None if end is None else f"{end:.4g}" for end in (self.least, self.most))
        if low is not None and high is not None:
            return low if low == high else f"{low} to {high}"
        return f"≥ {low}" if low is not None else f"≤ {high}" if high is not None else "reported"

    def sentence(self) -> str:
        """A bar that is missed, with its numbers."""
        return f"bars.{self.bar}: {self.what} of {self.arm} is {self.value:.4g}, expected {self.words}"

    def plain(self) -> dict[str, Any]:
        """The verdict as `summary.json` holds it."""
        return asdict(self) | {"judged": self.judged, "holds": self.holds}


def judged(told: Mapping[str, Any]) -> Verdict:
    """The verdict that `summary.json` holds."""
    return Verdict(**{field.name: told[field.name] for field in fields(Verdict)})


def expected_prefix(parts: int, part_tokens: int, earlier: int) -> float:
    """E[LCP] in tokens of a random order of `parts` equal parts with the closest of `earlier` random orders.

    The first j parts agree with one order with probability (parts − j)! ÷ parts!, and with at least one of n
    independent orders with 1 − (1 − that)^n; the expectation is the sum over j.
    """
    alike = [math.factorial(parts - j) / math.factorial(parts) for j in range(1, parts + 1)]
    return part_tokens * sum(1 - (1 - share) ** earlier for share in alike)

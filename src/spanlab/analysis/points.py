"""Measured steps: their features, and their duration in each repeat."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from spanlab.core.step_features import StepFeatures


class StepId(NamedTuple):
    """One step of a design: the number of its shape, and its number within the shape."""

    shape: int
    step: int


@dataclass(frozen=True, slots=True)
class Point:
    """A measured step: nanoseconds in each repeat, counted from the end of the step before."""

    step_id: StepId
    arm: str
    features: StepFeatures
    cycles_ns: tuple[int, ...]

    @property
    def mean_ns(self) -> float:
        """Mean over repeats, in nanoseconds."""
        return fmean(self.cycles_ns)

    @property
    def median_ns(self) -> float:
        """Median over repeats, in nanoseconds, which occasional interruptions of the machine do not change."""
        return median(self.cycles_ns)

    def row(self) -> dict[str, Any]:
        """Return the step as one flat row."""
        return {**self.step_id._asdict(), "arm": self.arm, **self.features._asdict(), "cycles_ns": self.cycles_ns}

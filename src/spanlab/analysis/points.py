"""Measured steps: what they did, and how long they took in each repeat."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from spanlab.core.step_features import StepFeatures


class Place(NamedTuple):
    """One step of a design: the number of its shape, and its own number within the shape."""

    shape: int
    step: int


@dataclass(frozen=True, slots=True)
class Point:
    """A step that was measured: its nanoseconds in each repeat, each from the end of the step before."""

    place: Place
    arm: str
    features: StepFeatures
    cycles_ns: tuple[int, ...]

    @property
    def mean_ns(self) -> float:
        """Mean over repeats."""
        return fmean(self.cycles_ns)

    @property
    def median_ns(self) -> float:
        """Median over repeats: a machine that does something else now and then does not move it."""
        return median(self.cycles_ns)

    def row(self) -> dict[str, Any]:
        """The step as one flat row."""
        return {**self.place._asdict(), "arm": self.arm, **self.features._asdict(), "cycles_ns": self.cycles_ns}

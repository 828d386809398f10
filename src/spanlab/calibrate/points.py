"""Measured steps: what they did, how long they took in each repeat, and their lines on disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import orjson

from spanlab.core.step_features import StepFeatures


class Place(NamedTuple):
    """One step of the design."""

    shape: int
    wave: int
    step: int


@dataclass(frozen=True, slots=True)
class Point:
    """A step that was measured: the cycles of its repeats, in nanoseconds, each from the end of the step before."""

    place: Place
    arm: str
    features: StepFeatures
    cycles_ns: tuple[int, ...]

    @property
    def mean_ns(self) -> float:
        """Mean of its repeats."""
        return fmean(self.cycles_ns)

    @property
    def median_ns(self) -> float:
        """Their median: a machine that does something else now and then does not move it."""
        return median(self.cycles_ns)

    def row(self) -> dict[str, Any]:
        """For a line of JSON, flat."""
        return {**self.place._asdict(), "arm": self.arm, **self.features._asdict(), "cycles_ns": self.cycles_ns}


def merged(rounds: Sequence[Sequence[Point]]) -> list[Point]:
    """Rounds of one design as one, the cycles of each step side by side."""
    found = []
    for same in zip(*rounds, strict=True):
        first = same[0]
        assert all((one.place, one.features) == (first.place, first.features) for one in same), "steps differ"
        found.append(replace(first, cycles_ns=tuple(cycle for one in same for cycle in one.cycles_ns)))
    return found


def write_rows(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """A line of JSON each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))


def read_points(path: Path) -> list[Point]:
    """The points whose rows were written."""
    return [_point(orjson.loads(line)) for line in path.read_bytes().splitlines()]


def _point(row: dict[str, Any]) -> Point:
    place = Place(row["shape"], row["wave"], row["step"])
    features = StepFeatures(**{name: row[name] for name in StepFeatures._fields})
    return Point(place, row["arm"], features, tuple(row["cycles_ns"]))

"""How well the simulator predicts the engine: whether an engine study asks, and at which loads it asks thoroughly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spanlab.checks import positive

if TYPE_CHECKING:
    from spanlab.settings.study import Study

_PACED = ("poisson", "gamma", "deterministic")


@dataclass
class FidelitySettings:
    """Comparison of the simulator with the engine on the same arrivals.

    `compare`      adds the comparison to the report; null: yes on the engine, unless shares are given
    `shares`       loads, as shares of the load that saturates the baseline; every arm runs at each of them instead of
                   `arrivals.rate_rps`
    `repeats`      runs of every arm at every load on the engine; their differences are the A/A spread
    `shapes`       shapes for calibration, where no profile is named; with shares they alternate with the repeats, so
                   that drift of the machine affects both
    """

    compare: bool | None = None
    shares: list[float] = field(default_factory=list)
    repeats: int = 1
    shapes: int = 48

    def __post_init__(self) -> None:
        for share in self.shares:
            positive("fidelity.shares", share)
        if len(set(self.shares)) != len(self.shares):
            raise ValueError(f"fidelity.shares={self.shares}: expected different shares of saturation")
        positive("fidelity.repeats", self.repeats)
        if self.shapes < 2:
            raise ValueError(f"fidelity.shapes={self.shapes}: expected 2 or more, each is predicted from the others")
        if not self.shares and self.repeats > 1:
            raise ValueError(
                f"fidelity.repeats={self.repeats} without fidelity.shares: "
                "expected shares of saturation, as in -cn quality_fidelity"
            )
        if self.shares and self.compare is not None:
            raise ValueError(
                f"fidelity.compare={self.compare} with fidelity.shares={self.shares}: expected one of both"
            )

    def check(self, study: Study) -> None:
        """Refuse what a study makes no sense of."""
        if study.backend != "engine" and (self.compare or self.shares):
            key, value = ("shares", self.shares) if self.shares else ("compare", self.compare)
            raise ValueError(f"fidelity.{key}={value} with backend={study.backend}: expected backend=engine")
        if self.shares:
            _check_loads(study)

    def wanted(self, backend: str) -> bool:
        """Whether a study says how well the simulator predicts it."""
        return backend == "engine" and self.compare is not False


def _check_loads(study: Study) -> None:
    arrivals = study.arrivals
    if len(study.seeds) != 1:
        raise ValueError(f"seeds={study.seeds} with fidelity.shares: expected one seed, whose arrivals are repeated")
    if study.load.rates_rps:
        raise ValueError(f"load.rates_rps={study.load.rates_rps} with fidelity.shares: expected none, shares are loads")
    if study.baseline not in study.chosen():
        raise ValueError(f"baseline={study.baseline} with fidelity.shares: expected one of the arms that run")
    if arrivals.kind not in _PACED or study.workload.kind == "ragpulse":
        kinds = f"arrivals.kind={arrivals.kind} and workload.kind={study.workload.kind} with fidelity.shares"
        raise ValueError(f"{kinds}: expected arrivals that can be paced, {', '.join(_PACED)}, and no recorded times")
    if arrivals.rate_rps != 1.0:
        raise ValueError(
            f"arrivals.rate_rps={arrivals.rate_rps} with fidelity.shares: expected 1, for shares of saturation set it"
        )

"""Engine compared with simulator: measured and predicted delays of the same requests, by arm and load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from spanlab.analysis.decisions import decide
from spanlab.analysis.errors import METRICS, Delays, errors
from spanlab.analysis.goals import judge


class ScheduleMatch(NamedTuple):
    """Steps of equal composition before the first difference, all steps of the engine, and that difference as text."""

    equal: int
    steps: int
    difference: str | None

    @property
    def share(self) -> float:
        """Share of matching steps; 1 where all match or there are none."""
        return self.equal / self.steps if self.steps else 1.0

    @staticmethod
    def of_all(runs: Sequence[ScheduleMatch]) -> ScheduleMatch:
        """Return the match of several runs together, with the first difference of any."""
        difference = next((run.difference for run in runs if run.difference), None)
        return ScheduleMatch(sum(run.equal for run in runs), sum(run.steps for run in runs), difference)


@dataclass(frozen=True)
class ArmComparison:
    """One arm at one load: delays of every request, measured in each repeat and predicted once.

    share           load as a share of saturation; None where the study sets a rate
    measured        delays by metric of each repeat, all seeds in a row
    schedule_match  over the steps of all runs
    outside         simulated steps outside the range that the profile was fitted to, of `simulated`; a run of equal
                    decode steps counts once
    """

    arm: str
    family: str
    share: float | None
    rate_rps: float | None
    measured: list[Delays]
    predicted: Delays
    schedule_match: ScheduleMatch
    outside: int
    simulated: int

    def row(self) -> dict[str, Any]:
        """Return the entry of `summary.json`."""
        return {
            "arm": self.arm,
            "load": self.share,
            "rate_rps": self.rate_rps,
            "repeats": len(self.measured),
            "requests": len(self.predicted[METRICS[0]]),
            "parity": self.schedule_match._asdict(),
            "steps_outside_hull": self.outside,
            "simulated_steps": self.simulated,
            "errors": errors(self.measured, self.predicted),
        }


def summarise(comparisons: Sequence[ArmComparison]) -> dict[str, Any]:
    """Return cells by load and arm, pooled errors and ranks by load, and goals where runs are repeated."""
    loads = by_load(comparisons)
    cells = [arm.row() for arms in loads for arm in arms]
    rates = [_at_load(arms) for arms in loads]
    repeated = any(len(arm.measured) > 1 for arm in comparisons)
    return {"cells": cells, "rates": rates} | ({"goals": judge(cells, rates)} if repeated else {})


def by_load(comparisons: Sequence[ArmComparison]) -> list[list[ArmComparison]]:
    """Return the arms of each load, in increasing order of load."""
    rates = sorted({arm.rate_rps for arm in comparisons}, key=lambda rate: rate or 0.0)
    return [[arm for arm in comparisons if arm.rate_rps == rate] for rate in rates]


def _at_load(arms: Sequence[ArmComparison]) -> dict[str, Any]:
    entry = {"load": arms[0].share, "rate_rps": arms[0].rate_rps, "errors": pooled_errors(arms)}
    return entry | (ranks(arms) if len(arms) > 1 else {})


def ranks(comparisons: Sequence[ArmComparison]) -> dict[str, Any]:
    """Return ranks of the arms at one load by mean TTFT, on the engine and in the simulator."""
    means = {comparison.arm: mean_ttft(comparison) for comparison in comparisons}
    measured = {arm: repeats for arm, (repeats, _) in means.items()}
    return decide(measured, {arm: predicted for arm, (_, predicted) in means.items()})


def pooled_errors(comparisons: Sequence[ArmComparison]) -> dict[str, Any]:
    """Return errors over the requests of all arms together, repeat by repeat."""
    repeats = min(len(arm.measured) for arm in comparisons)
    measured = [concatenate_delays([arm.measured[repeat] for arm in comparisons]) for repeat in range(repeats)]
    return errors(measured, concatenate_delays([arm.predicted for arm in comparisons]))


def concatenate_delays(runs: Sequence[Delays]) -> Delays:
    """Concatenate the delays of several runs."""
    return {metric: np.concatenate([run[metric] for run in runs]) for metric in METRICS}


def mean_ttft(comparison: ArmComparison) -> tuple[list[float], float]:
    """Return mean TTFT in seconds: one per repeat on the engine, and the predicted one."""
    return [float(np.mean(repeat["ttft_s"])) for repeat in comparison.measured], float(
        np.mean(comparison.predicted["ttft_s"])
    )

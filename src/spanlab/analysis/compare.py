"""Engine beside simulator: delays of the same requests measured and predicted, by arm and load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from spanlab.analysis.decisions import decide
from spanlab.analysis.errors import METRICS, Delays, errors
from spanlab.analysis.goals import judge


class ScheduleMatch(NamedTuple):
    """Steps composed alike before the first that was not, of all steps of the engine, and that one in words."""

    equal: int
    steps: int
    difference: str | None

    @property
    def share(self) -> float:
        """1 where every step is alike."""
        return self.equal / self.steps if self.steps else 1.0

    @staticmethod
    def of_all(runs: Sequence[ScheduleMatch]) -> ScheduleMatch:
        """Steps of several runs as one, with the first difference of any."""
        difference = next((one.difference for one in runs if one.difference), None)
        return ScheduleMatch(sum(one.equal for one in runs), sum(one.steps for one in runs), difference)


@dataclass(frozen=True)
class Compared:
    """One arm at one load, the delays of every request measured in each repeat and predicted once.

    share           load as a share of saturation; None where the study sets a rate
    measured        delays by metric of each repeat, all seeds in a row
    schedule_match  over the steps of all runs
    outside         simulated steps beyond what the profile was fitted to, of `simulated`; a run of equal decode steps
                    is one
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
        """The entry of the summary."""
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


def summarise(found: Sequence[Compared]) -> dict[str, Any]:
    """Cells by load and arm; at each load all arms together and their ranks; goals where runs are repeated."""
    loads = by_load(found)
    cells = [one.row() for own in loads for one in own]
    rates = [_at_load(own) for own in loads]
    repeated = any(len(one.measured) > 1 for one in found)
    return {"cells": cells, "rates": rates} | ({"goals": judge(cells, rates)} if repeated else {})


def by_load(found: Sequence[Compared]) -> list[list[Compared]]:
    """Arms of each load, light loads first."""
    rates = sorted({one.rate_rps for one in found}, key=lambda rate: rate or 0.0)
    return [[one for one in found if one.rate_rps == rate] for rate in rates]


def _at_load(own: Sequence[Compared]) -> dict[str, Any]:
    told = {"load": own[0].share, "rate_rps": own[0].rate_rps, "errors": pooled(own)}
    return told | (ranks(own) if len(own) > 1 else {})


def ranks(found: Sequence[Compared]) -> dict[str, Any]:
    """Arms at one load by mean TTFT, on the engine and in the simulator."""
    means = {one.arm: mean_ttft(one) for one in found}
    measured = {arm: repeats for arm, (repeats, _) in means.items()}
    return decide(measured, {arm: predicted for arm, (_, predicted) in means.items()})


def pooled(found: Sequence[Compared]) -> dict[str, Any]:
    """Errors over the requests of all arms together, repeat by repeat."""
    repeats = min(len(one.measured) for one in found)
    measured = [joined([one.measured[at] for one in found]) for at in range(repeats)]
    return errors(measured, joined([one.predicted for one in found]))


def joined(parts: Sequence[Delays]) -> Delays:
    """Requests of several runs as if they were one."""
    return {metric: np.concatenate([part[metric] for part in parts]) for metric in METRICS}


def mean_ttft(one: Compared) -> tuple[list[float], float]:
    """Mean TTFT in seconds: of each repeat on the engine, and predicted."""
    return [float(np.mean(repeat["ttft_s"])) for repeat in one.measured], float(np.mean(one.predicted["ttft_s"]))

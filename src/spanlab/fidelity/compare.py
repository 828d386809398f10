"""Engine beside simulator, one arm at one load at a time: the same arrivals, both records, the gap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spanlab.fidelity.errors import METRICS, Delays, delays, errors
from spanlab.fidelity.parity import Parity
from spanlab.fidelity.replay import Trace, predict, replay
from spanlab.settings import Study
from spanlab.study import summary as sums
from spanlab.study.results import family
from spanlab.study.step_log import read_steps
from spanlab_sim.calibrated import CalibratedTiming, Profile


@dataclass(frozen=True)
class Compared:
    """One arm at one load, every request's delays measured in each repeat and predicted once.

    `share`     load as a share of saturation; None where the study set a rate instead
    `parity`    over the steps of all repeats
    `outside`   simulated steps with work beyond what the profile was fitted to, of `simulated`; a run of equal decode
                steps is one
    """

    arm: str
    family: str
    share: float | None
    rate_rps: float | None
    measured: list[Delays]
    predicted: Delays
    parity: Parity
    outside: int
    simulated: int

    def row(self) -> dict[str, Any]:
        """What the summary says of it."""
        return {
            "arm": self.arm,
            "load": self.share,
            "rate_rps": self.rate_rps,
            "repeats": len(self.measured),
            "requests": len(self.predicted[METRICS[0]]),
            "parity": {"equal": self.parity.equal, "steps": self.parity.steps, "difference": self.parity.difference},
            "steps_outside_hull": self.outside,
            "simulated_steps": self.simulated,
            "errors": errors(self.measured, self.predicted),
        }


def compared(
    study: Study,
    arm: str,
    share: float | None,
    trace: Trace,
    profile: Profile,
    measured: list[Delays],
    logs: Sequence[Path],
    path: Path,
) -> Compared:
    """Simulate one arm under a profile, its records to `path`, and lay it beside the engine's repeats."""
    timing = CalibratedTiming(profile)
    predict(study, arm, trace, timing, path)
    parities = [replay(study, arm, trace, read_steps(log)) for log in logs]
    return Compared(
        arm=arm,
        family=family(study.arms[arm]),
        share=share,
        rate_rps=trace.rate_rps,
        measured=measured,
        predicted=delays(sums.read_records(path)),
        parity=together(parities),
        outside=timing.outside,
        simulated=timing.asked,
    )


def together(parities: Sequence[Parity]) -> Parity:
    """The steps of several runs as one, with the first difference of any."""
    difference = next((one.difference for one in parities if one.difference), None)
    return Parity(sum(one.equal for one in parities), sum(one.steps for one in parities), difference)


def mean_ttft(one: Compared) -> tuple[list[float], float]:
    """Seconds: of each repeat on the engine, and predicted."""
    return [float(np.mean(repeat["ttft_s"])) for repeat in one.measured], float(np.mean(one.predicted["ttft_s"]))

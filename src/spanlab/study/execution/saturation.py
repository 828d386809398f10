"""Loads as shares of the saturation rate: the rate of the baseline when all requests arrive at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from spanlab.settings import ArrivalSettings, LoadSweep, Study
from spanlab.study.execution.arms import arms_of
from spanlab.study.execution.cells import Task, cells
from spanlab.study.execution.worker import Worker
from spanlab.study.numbers.results import REMEDY, ArmFailure
from spanlab.study.output.arm_files import ArmFiles
from spanlab.study.progress import print_line
from spanlab.workloads import Workload


@dataclass(frozen=True)
class Saturation:
    """Throughput of the baseline when all requests arrive at the start."""

    arm: str
    requests: int
    seconds: float
    rate_rps: float

    def shares(self, shares: Iterable[float]) -> dict[float, float]:
        """Map each rate, in requests per second, to its share."""
        return {share * self.rate_rps: share for share in shares}


def measure_saturation(study: Study, workload: Workload, files: ArmFiles, folder: Path, console: Console) -> Saturation:
    """Measure the baseline's saturation rate, or read it from `files` of an interrupted run."""
    arm = study.baseline
    if not files.finished():
        _run(study, workload, files, folder)
    (row,) = files.finished()
    saturation = Saturation(arm, row["requests"], row["makespan_s"], row["requests"] / row["makespan_s"])
    text = (
        f"arms.{arm} saturates at {saturation.rate_rps:.3g} requests/s, with all {saturation.requests} queued at once"
    )
    print_line(console, f"{text}; load.shares are shares of this rate")
    return saturation


def _run(study: Study, workload: Workload, files: ArmFiles, folder: Path) -> None:
    at_once = replace(
        study,
        arrivals=ArrivalSettings(kind="saturating", order=study.arrivals.order),
        load=LoadSweep(),
        repeats=1,
        analyses=["compare_backends"],
        engine=replace(study.engine, record="nothing", teacher=None),
    )
    with arms_of(at_once, workload.requests, 1, 1, folder) as arms:
        arms.call(Worker.warm_up)
        running = arms.start([(Task(0, study.baseline, files, tuple(cells(at_once, study.baseline))),)])
        for end in arms.finish(running, lambda counts: None, 0.2).values():
            assert isinstance(end, ArmFailure), "no analysis of this study needs ARMS"
            raise ValueError(f"the saturation rate could not be measured: {end.sentence}; {REMEDY}")


def at_saturation_shares(study: Study, saturation: Saturation) -> Study:
    """Return the study with rates at its shares of saturation: one sample path of arrivals, scaled to each load."""
    first, *other_rates = saturation.shares(study.load.shares)
    arms = study.chosen() if other_rates else []
    load = LoadSweep(rates_rps=other_rates, arms=arms, seeds=study.seeds)
    arrivals = replace(study.arrivals, rate_rps=first)
    return replace(study, arrivals=arrivals, load=load, analyses=study.chosen_analyses())

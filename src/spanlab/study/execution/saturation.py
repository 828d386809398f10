"""Loads as shares of saturation: the baseline serves all requests at once, and its rate is what saturates it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from spanlab.settings import ArrivalSettings, LoadSweep, Study
from spanlab.study.execution.arms import arms_of
from spanlab.study.execution.cells import Task, cells
from spanlab.study.execution.worker import Worker
from spanlab.study.numbers.results import WAY_OUT, ArmFailure
from spanlab.study.output.arm_files import ArmFiles
from spanlab.study.progress import say
from spanlab.workloads import Workload


@dataclass(frozen=True)
class Saturation:
    """What the baseline serves when every request is there from the start."""

    arm: str
    requests: int
    seconds: float
    rate_rps: float

    def shares(self, shares: Iterable[float]) -> dict[float, float]:
        """Shares by rate, requests per second."""
        return {share * self.rate_rps: share for share in shares}


def measure_saturation(study: Study, workload: Workload, files: ArmFiles, folder: Path, console: Console) -> Saturation:
    """Measure the baseline's saturation, or read it from `files` where a run that was interrupted has measured it."""
    arm = study.baseline
    if not files.finished():
        _run(study, workload, files, folder)
    (row,) = files.finished()
    found = Saturation(arm, row["requests"], row["makespan_s"], row["requests"] / row["makespan_s"])
    words = f"{arm} serves {found.rate_rps:.3g} requests/s when all {found.requests} are there"
    say(console, f"{words}; loads are shares of that")
    return found


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
        arms.ask(Worker.warm_up)
        running = arms.start([Task(0, study.baseline, files, tuple(cells(at_once, study.baseline)))])
        for end in arms.finish(running, lambda counts: None, 0.2).values():
            assert isinstance(end, ArmFailure), "this study reports no arm"
            raise ValueError(f"no load is known: {end.sentence}; {WAY_OUT}")


def paced(study: Study, saturation: Saturation) -> Study:
    """The study at its shares of saturation: one sample path, stretched to each load."""
    first, *others = saturation.shares(study.load.shares)
    arms = study.chosen() if others else []
    load = LoadSweep(rates_rps=others, arms=arms, seeds=study.seeds)
    arrivals = replace(study.arrivals, rate_rps=first)
    return replace(study, arrivals=arrivals, load=load, analyses=study.chosen_analyses())

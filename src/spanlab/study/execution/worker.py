"""The work of one process: arms of one study, and what all of them share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from spanlab.core.placement import PlacementError
from spanlab.core.request import Request
from spanlab.out_of_memory import CAUGHT, OutOfMemoryError, out_of_memory
from spanlab.plugins import load_plugins
from spanlab.settings import Study
from spanlab.settings.analyses import ARMS, needed
from spanlab.study.execution.backends import BACKENDS, RealEngine
from spanlab.study.execution.cells import Bench, Task, cells, run_arm
from spanlab.study.execution.jobs import Jobs
from spanlab.study.fidelity.shapes import calibration_of, designed_workload
from spanlab.study.numbers.bounds import StudyBounds
from spanlab.study.numbers.results import WAY_OUT, ArmFailure, ArmResult, read_arm
from spanlab.study.output.arm_files import Cell


class StoppedError(Exception):
    """The study was given up while this arm ran; its finished cells are kept."""


def always() -> bool:
    """A process of this machine ends with its study, so that its work is wanted as long as it lasts."""
    return True


class Worker:
    """Sent to a process once; what it builds there stays there.

    `counts`  file of requests finished by each row, int64
    `wanted`  whether the study still waits for the running task
    """

    def __init__(
        self, study: Study, requests: tuple[Request, ...], counts: Path, wanted: Callable[[], bool] = always
    ) -> None:
        self.study, self.requests, self.counts, self.wanted = study, requests, counts, wanted
        load_plugins(study.plugins)  # where a worker arrives, nothing is registered yet

    def __reduce__(self) -> tuple[Any, ...]:
        return Worker, (self.study, self.requests, self.counts, self.wanted)

    @cached_property
    def _bench(self) -> Bench:
        return Bench(Jobs(self.study, self.requests), BACKENDS[self.study.backend](self.study))

    @cached_property
    def _calibration(self) -> Bench:
        """Shapes on the same model."""
        study, engine = calibration_of(self.study, self.requests), self._bench.backend
        assert isinstance(engine, RealEngine), "only the engine is calibrated"
        return Bench(Jobs(study, designed_workload(study).requests), RealEngine(study, engine))

    @cached_property
    def _bounds(self) -> StudyBounds:
        return StudyBounds(self._bench)

    @cached_property
    def _counts(self) -> np.memmap[Any, Any]:
        return np.memmap(self.counts, np.int64, "r+")

    def run(self, task: Task) -> ArmResult | ArmFailure | None:
        """Do one task; the arm's result where that was its last and is reported, else None."""
        others = [row["requests"] for row in task.files.finished() if Cell.of(row) not in task.cells]
        self._counts[task.row] = sum(others)
        try:
            bench = self._calibration if task.calibrates else self._bench
            run_arm(bench, task, lambda finished: self._progress(task.row, finished))
            return self._result(task)
        except PlacementError as error:
            return ArmFailure(task.arm, f"arms.{task.arm}.{error}")
        except CAUGHT as error:
            said = out_of_memory(error)
            if said is None:
                raise
        self._bench.backend.recover()  # out here, where no traceback holds what ran any more
        return ArmFailure(task.arm, f"arms.{task.arm} ran out of memory: {said}")

    def _progress(self, row: int, finished: int) -> None:
        self._counts[row] += finished
        if not self.wanted():
            raise StoppedError

    def _result(self, task: Task) -> ArmResult | None:
        if not task.last or task.calibrates:
            return None
        task.files.arrange(cells(self.study, task.arm))
        if not needed(self.study, ARMS):
            return None
        return read_arm(self.study, task.arm, task.files, self._bounds)

    def warm_up(self) -> None:
        """Let every arm serve a little before the first is measured."""
        try:
            self._bench.backend.warm_up(self.requests)
        except CAUGHT as error:
            said = out_of_memory(error)
            if said is None:
                raise
            raise OutOfMemoryError(f"the engine ran out of memory before any arm: {said}; {WAY_OUT}") from None

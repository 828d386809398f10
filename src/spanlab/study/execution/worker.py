"""Worker of one process: runs tasks of one study and caches the objects that its arms share."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from spanlab.core.placement import PlacementError
from spanlab.core.request import Request
from spanlab.engine.settings import MissingBaselineError
from spanlab.out_of_memory import CAUGHT, OutOfMemoryError, out_of_memory
from spanlab.plugins import load_plugins
from spanlab.settings import Study
from spanlab.settings.analyses import ARMS, needed
from spanlab.study.execution.backends import BACKENDS, RealEngine
from spanlab.study.execution.cells import Runtime, Task, cells, run_arm
from spanlab.study.execution.jobs import Jobs
from spanlab.study.fidelity.shapes import calibration_of, designed_workload
from spanlab.study.numbers.bounds import StudyBounds
from spanlab.study.numbers.results import REMEDY, ArmFailure, ArmResult, read_arm
from spanlab.study.output.arm_files import Cell

Outcome = ArmResult | ArmFailure | None
READING_PERIOD_S = 60.0  # between readings of the machine while tasks alternate


class StoppedError(Exception):
    """The study was cancelled while this arm ran; finished cells stay in the files."""


def always_active() -> bool:
    """Return True: a process of this machine ends with its study, so that its task is always active."""
    return True


class Worker:
    """Worker that is sent to a process once; it caches the objects that it builds there.

    `counts`     file of the number of finished requests of each row, int64
    `is_active`  whether the study still waits for the running task
    """

    def __init__(
        self, study: Study, requests: tuple[Request, ...], counts: Path, is_active: Callable[[], bool] = always_active
    ) -> None:
        self.study, self.requests, self.counts, self.is_active = study, requests, counts, is_active
        load_plugins(study.plugins)  # the receiving process has no plugin registered

    def __reduce__(self) -> tuple[Any, ...]:
        return Worker, (self.study, self.requests, self.counts, self.is_active)

    @cached_property
    def _runtime(self) -> Runtime:
        return Runtime(Jobs(self.study, self.requests), BACKENDS[self.study.backend](self.study))

    @cached_property
    def _calibration(self) -> Runtime:
        """Runtime of the calibration, on the same model."""
        study, engine = calibration_of(self.study, self.requests), self._runtime.backend
        assert isinstance(engine, RealEngine), "only the engine is calibrated"
        return Runtime(Jobs(study, designed_workload(study).requests), RealEngine(study, engine))

    @cached_property
    def _bounds(self) -> StudyBounds:
        return StudyBounds(self._runtime)

    @cached_property
    def _counts(self) -> np.memmap[Any, Any]:
        return np.memmap(self.counts, np.int64, "r+")

    def run(self, tasks: tuple[Task, ...]) -> list[Outcome]:
        """Run tasks that alternate: each serves until its next pause, then the next task does.

        A task's outcome is the arm's result after its last task if an analysis needs it, else None.
        """
        outcomes: list[Outcome] = [None] * len(tasks)
        running = {number: self._run_task(task) for number, task in enumerate(tasks)}
        reading_at = monotonic() + READING_PERIOD_S
        while running:
            for number, run in list(running.items()):
                try:
                    next(run)
                except StopIteration as end:
                    outcomes[number] = end.value
                    del running[number]
            if running and len(tasks) > 1 and monotonic() > reading_at:
                self._record_reading(tasks[0])
                reading_at = monotonic() + READING_PERIOD_S
        return outcomes

    def _record_reading(self, task: Task) -> None:
        backend, path = self._runtime.backend, task.files.readings
        assert isinstance(backend, RealEngine), "only runs of the engine alternate"
        if path is not None:
            backend.record_reading(path)

    def _run_task(self, task: Task) -> Generator[None, None, Outcome]:
        """Run one task, and yield at the pauses of its runs."""
        other_requests = [row["requests"] for row in task.files.finished() if Cell.of(row) not in task.cells]
        self._counts[task.row] = sum(other_requests)
        try:
            runtime = self._calibration if task.calibrates else self._runtime
            yield from run_arm(runtime, task, lambda finished: self._progress(task.row, finished))
            return self._result(task)
        except PlacementError as error:
            return ArmFailure(task.arm, f"arms.{task.arm}.{error}")
        except MissingBaselineError:
            return ArmFailure(task.arm, f"arms.{task.arm} is not scored, because arms.{self.study.baseline} failed")
        except CAUGHT as error:
            description = out_of_memory(error)
            if description is None:
                raise
        self._runtime.backend.recover()  # after the except block: its traceback keeps the failed run alive
        return ArmFailure(task.arm, f"arms.{task.arm} ran out of memory: {description}")

    def _progress(self, row: int, finished: int) -> None:
        self._counts[row] += finished
        if not self.is_active():
            raise StoppedError

    def _result(self, task: Task) -> ArmResult | None:
        if not task.last or task.calibrates:
            return None
        expected = cells(self.study, task.arm)
        if missing := set(expected) - {Cell.of(row) for row in task.files.finished()}:
            raise ValueError(
                f"arms.{task.arm}: {task.files.runs} lacks {len(missing)} of {len(expected)} finished runs; expected "
                "a folder that nothing else changes until the study ends"
            )
        task.files.sort_cells(expected)
        if not needed(self.study, ARMS):
            return None
        return read_arm(self.study, task.arm, task.files, self._bounds)

    def warm_up(self) -> None:
        """Serve a few requests with every arm before the first measurement."""
        try:
            self._runtime.backend.warm_up(self.requests)
        except CAUGHT as error:
            description = out_of_memory(error)
            if description is None:
                raise
            raise OutOfMemoryError(f"the engine ran out of memory in the warm-up: {description}; {REMEDY}") from None

"""Worker of one process: runs tasks of one study and caches the objects that its arms share."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from spanlab.core.placement.rules import PlacementError
from spanlab.core.request import Request
from spanlab.engine.settings import MissingBaselineError
from spanlab.errors import CAUGHT, OutOfMemoryError, out_of_memory
from spanlab.settings.analyses import ARMS
from spanlab.settings.study import Study
from spanlab.study.backends import BACKENDS, RealEngine
from spanlab.study.bounds import REMEDY, ArmFailure, ArmResult, StudyBounds, read_arm
from spanlab.study.executor import KILLED, Executor, ProcessKilledError, check_active, executor
from spanlab.study.jobs import (
    Jobs,
    Runtime,
    Task,
    calibration_of,
    designed_workload,
    run_arm,
    run_cells,
)
from spanlab.study.machine import PLAIN_NAME
from spanlab.study.numbers import RunCell

Outcome = ArmResult | ArmFailure | None
READING_PERIOD_S = 60.0  # between readings of the machine while tasks alternate


class Worker:
    """Worker that is sent to a process once; it caches the objects that it builds there.

    `counts`  file of the number of finished requests of each row, int64
    """

    def __init__(self, study: Study, requests: tuple[Request, ...], counts: Path) -> None:
        self.study, self.requests, self.counts = study, requests, counts

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
                backend, path = self._runtime.backend, tasks[0].files.readings
                assert isinstance(backend, RealEngine), "only runs of the engine alternate"
                if path is not None:
                    backend.record_reading(path)
                reading_at = monotonic() + READING_PERIOD_S
        return outcomes

    def close(self) -> None:
        """End what the backend has started."""
        if "_runtime" in vars(self):
            self._runtime.backend.close()

    def _run_task(self, task: Task) -> Generator[None, None, Outcome]:
        """Run one task, and yield at the pauses of its runs."""
        others = (row for row in task.files.finished() if RunCell.of(row) not in task.cells)
        self._counts[task.row] = sum(row["requests"] for row in others)
        try:
            runtime = self._calibration if task.calibrates else self._runtime
            yield from run_arm(runtime, task, lambda finished: self._progress(task.row, finished))
            return self._result(task)
        except PlacementError as error:
            return ArmFailure(task.arm, f"arms.{task.arm}.{error}")
        except MissingBaselineError:
            cause = f"because arms.{self.study.runs.baseline} failed"
            return ArmFailure(task.arm, f"arms.{task.arm} is not scored, {cause}")
        except CAUGHT as error:
            description = out_of_memory(error)
            if description is None:
                raise
        # after the except block, whose traceback keeps the failed run alive
        self._runtime.backend.recover()
        name = PLAIN_NAME if task.plain else f"arms.{task.arm}"
        return ArmFailure(task.arm, f"{name} ran out of memory: {description}")

    def _progress(self, row: int, finished: int) -> None:
        self._counts[row] += finished
        check_active()

    def _result(self, task: Task) -> ArmResult | None:
        if not task.last or task.calibrates:
            return None
        expected = run_cells(self.study, task.arm)
        if missing := set(expected) - {RunCell.of(row) for row in task.files.finished()}:
            lacks = f"lacks {len(missing)} of {len(expected)} finished runs"
            raise ValueError(
                f"arms.{task.arm}: {task.files.runs} {lacks}; expected "
                "a folder that nothing else changes until the study ends"
            )
        task.files.sort_cells(expected)
        if task.plain or not self.study.needs(ARMS):
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
            text = f"the engine ran out of memory in the warm-up: {description}"
            raise OutOfMemoryError(f"{text}; {REMEDY}") from None


# ------------------------------------------------------------------------------
# The arms of a study on an executor: start, progress and outcomes.
# ------------------------------------------------------------------------------

Outcomes = dict[int, ArmResult | ArmFailure]
PERIOD_S = 0.2  # between two looks at the progress


@contextmanager
def workers_of(
    study: Study, requests: tuple[Request, ...], rows: int, processes: int, folder: Path
) -> Iterator[Executor[Worker]]:
    """The executor of a study; the progress counts of `rows` rows are in `folder` while it runs."""
    scratch = folder / ".running"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        counts = scratch / "counts"
        counts.write_bytes(bytes(8 * rows))
        worker = Worker(study, requests, counts)
        with executor(study.executor, worker, processes, study.plugins, scratch) as workers:
            yield workers
            if processes == 1:  # several run simulations, which start nothing
                workers.submit(Worker.close).result()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def run_tasks(
    workers: Executor[Worker],
    turns: list[tuple[Task, ...]],
    watch: Callable[[list[int]], None] = lambda counts: None,
) -> Outcomes:
    """Run turns, whose tasks alternate, and return the outcomes by row, failures included.

    `watch` gets the number of finished requests of each row. The remaining tasks of an arm that
    failed are cancelled.
    """
    counts = np.memmap(workers.worker.counts, np.int64, "r")
    running = {workers.submit(Worker.run, tasks): tasks for tasks in turns}
    outcomes: Outcomes = {}
    while running:
        for future in wait(running, PERIOD_S, FIRST_COMPLETED).done:
            tasks = running.pop(future)
            try:
                ends = future.result()  # any other error ends the study
            except ProcessKilledError:
                lost = f"its process {KILLED}"
                ends = [ArmFailure(task.arm, f"arms.{task.arm}: {lost}") for task in tasks]
            for task, end in zip(tasks, ends, strict=True):
                if end is not None and not _failed(outcomes, (task,)):
                    outcomes[task.row] = end
        for future, tasks in list(running.items()):
            if _failed(outcomes, tasks) and future.cancel():
                del running[future]
        watch(counts.tolist())
    return outcomes


def _failed(outcomes: Outcomes, tasks: tuple[Task, ...]) -> bool:
    return all(isinstance(outcomes.get(task.row), ArmFailure) for task in tasks)

"""The arms of a study on an executor: start, progress and outcomes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from spanlab.core.request import Request
from spanlab.settings import Study
from spanlab.study.execution.cells import Task
from spanlab.study.execution.executors import Executor, executor
from spanlab.study.execution.worker import Outcome, Worker
from spanlab.study.numbers.results import ArmFailure, ArmResult

T = TypeVar("T")
P = ParamSpec("P")
Work = Callable[Concatenate[Worker, P], T]
Running = dict[Future[list[Outcome]], tuple[Task, ...]]
Outcomes = dict[int, ArmResult | ArmFailure]
KILLED = "was killed, most likely because memory ran out"


class ProcessKilledError(ValueError):
    """A process was killed during work for the whole study, not for one arm."""


@contextmanager
def arms_of(study: Study, requests: tuple[Request, ...], rows: int, processes: int, folder: Path) -> Iterator[Arms]:
    """The executor of a study; the progress counts of `rows` rows are in `folder` while it runs."""
    scratch = folder / ".running"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        counts = scratch / "counts"
        counts.write_bytes(bytes(8 * rows))
        with executor(study.executor, Worker(study, requests, counts), processes) as pool:
            yield Arms(pool, counts)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class Arms:
    """Runs functions on an executor; `counts` is the file of finished requests by row."""

    def __init__(self, executor: Executor[Worker], counts: Path) -> None:
        self._executor, self._counts = executor, np.memmap(counts, np.int64, "r")

    def submit(self, work: Work[P, T], *arguments: P.args, **named: P.kwargs) -> Future[T]:
        """Submit `work(worker, *arguments)`."""
        return self._executor.submit(work, *arguments, **named)

    def call(self, work: Work[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run `work(worker, *arguments)` and return its result."""
        return self.result(self.submit(work, *arguments, **named))

    def result(self, future: Future[T]) -> T:
        """Wait for submitted work and return its result; ProcessKilledError where its process was killed."""
        try:
            return future.result()
        except self._executor.lost as error:
            raise ProcessKilledError(f"workers: a process {KILLED}; expected more memory or fewer workers=N") from error

    def start(self, turns: list[tuple[Task, ...]]) -> Running:
        """Submit every turn, whose tasks alternate."""
        return {self.submit(Worker.run, tasks): tasks for tasks in turns}

    def finish(self, running: Running, watch: Callable[[list[int]], None], period_s: float) -> Outcomes:
        """Wait for every arm and return the outcomes by row, failures included.

        `watch` gets the number of finished requests of each row every `period_s` seconds. The remaining tasks of an
        arm that failed are cancelled.
        """
        outcomes: Outcomes = {}
        while running:
            for future in wait(running, period_s, FIRST_COMPLETED).done:
                self._record_outcomes(future, running.pop(future), outcomes)
            for future in [future for future, tasks in running.items() if _failed(outcomes, tasks) and future.cancel()]:
                del running[future]
            watch(self._counts.tolist())
        return outcomes

    def _record_outcomes(self, future: Future[list[Outcome]], tasks: tuple[Task, ...], outcomes: Outcomes) -> None:
        try:
            ends = future.result()  # an error ends the study immediately
        except self._executor.lost:
            ends = [ArmFailure(task.arm, f"arms.{task.arm}: its process {KILLED}") for task in tasks]
        for task, end in zip(tasks, ends, strict=True):
            if end is not None and not _failed(outcomes, (task,)):
                outcomes[task.row] = end


def _failed(outcomes: Outcomes, tasks: tuple[Task, ...]) -> bool:
    return all(isinstance(outcomes.get(task.row), ArmFailure) for task in tasks)

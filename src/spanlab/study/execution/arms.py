"""The arms of a study on an executor: set going, watched, and how each ended."""

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
from spanlab.study.execution.worker import Worker
from spanlab.study.numbers.results import ArmFailure, ArmResult

T = TypeVar("T")
Given = ParamSpec("Given")
Work = Callable[Concatenate[Worker, Given], T]
Running = dict[Future[ArmResult | ArmFailure | None], Task]
Ends = dict[int, ArmResult | ArmFailure]
KILLED = "was killed, most likely for memory"


class LostError(ValueError):
    """A process was killed while it worked for the whole study, not for one arm."""


@contextmanager
def arms_of(study: Study, requests: tuple[Request, ...], rows: int, processes: int, folder: Path) -> Iterator[Arms]:
    """The executor of a study; `rows` of progress are kept in `folder` as long as it runs."""
    scratch = folder / ".running"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        counts = scratch / "counts"
        counts.write_bytes(bytes(8 * rows))
        with executor(study.executor, Worker(study, requests, counts), processes) as made:
            yield Arms(made, counts)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class Arms:
    """Work on an executor; `counts` is the file of finished requests by row."""

    def __init__(self, executor: Executor[Worker], counts: Path) -> None:
        self._executor, self._counts = executor, np.memmap(counts, np.int64, "r")

    def submit(self, work: Work[Given, T], *arguments: Given.args, **named: Given.kwargs) -> Future[T]:
        """Set `work(worker, *arguments)` going."""
        return self._executor.submit(work, *arguments, **named)

    def ask(self, work: Work[Given, T], *arguments: Given.args, **named: Given.kwargs) -> T:
        """What `work(worker, *arguments)` returns."""
        return self.result(self.submit(work, *arguments, **named))

    def result(self, future: Future[T]) -> T:
        """What work for the whole study returned."""
        try:
            return future.result()
        except self._executor.lost as error:
            raise LostError(f"workers: a process {KILLED}; expected more memory or fewer workers=N") from error

    def start(self, tasks: list[Task]) -> Running:
        """Set every task going."""
        return {self.submit(Worker.run, task): task for task in tasks}

    def finish(self, running: Running, watch: Callable[[list[int]], None], period_s: float) -> Ends:
        """Wait for every arm; `watch` sees the finished requests of each row every `period_s` seconds.

        An arm that fails is not gone on with. Returns by row what was returned, failures included.
        """
        ends: Ends = {}
        while running:
            for future in wait(running, period_s, FIRST_COMPLETED).done:
                self._settle(future, running.pop(future), ends)
            for future in [future for future, task in running.items() if _failed(ends, task) and future.cancel()]:
                del running[future]
            watch(self._counts.tolist())
        return ends

    def _settle(self, future: Future[ArmResult | ArmFailure | None], task: Task, ends: Ends) -> None:
        try:
            end = future.result()  # an error ends the study now, not at its end
        except self._executor.lost:
            end = ArmFailure(task.arm, f"arms.{task.arm} ended with its process, which {KILLED}")
        if end is not None and not _failed(ends, task):
            ends[task.row] = end


def _failed(ends: Ends, task: Task) -> bool:
    return isinstance(ends.get(task.row), ArmFailure)

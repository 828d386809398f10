"""Arms on all cores: one process per core, one arm at a time each, progress in shared memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from spanlab.core.request import Request
from spanlab.settings import Study
from spanlab.shortage import CAUGHT, ShortageError, shortage
from spanlab.study.bounds import StudyBounds
from spanlab.study.cells import Bench, Task, cells, run_arm
from spanlab.study.results import WAY_OUT, ArmFailure, ArmResult, read_arm

T = TypeVar("T")

# What a worker process works on; set once per process, because requests are large and arms are many.
_bench: Bench
_bounds: StudyBounds
_counts: Any
_stop: Any


class StoppedError(Exception):
    """The study was given up while this arm ran; what it had finished is kept."""


def _start(study: Study, requests: tuple[Request, ...], counts: Any, stop: Any, parent: int) -> None:
    global _bench, _bounds, _counts, _stop
    _bench, _counts, _stop = Bench.of(study, requests), counts, stop
    _bounds = StudyBounds(_bench)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends the pool
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this worker when its parent is gone: killed, it could tell nobody, and its workers would hold the run."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _run(task: Task) -> ArmResult | ArmFailure | None:
    """Do one task; the arm's result where that was its last, and None where others follow."""
    arm, _counts[task.row] = task.arm, 0

    def progress(finished: int) -> None:
        _counts[task.row] += finished
        if _stop.value:
            raise StoppedError

    try:
        run_arm(_bench, task, progress)
        whole = task.stop is None or task.stop == len(cells(_bench.study, arm))
        return read_arm(_bench.study, arm, task.files, _bounds) if whole else None
    except CAUGHT as error:
        said = shortage(error)
        if said is None:
            raise
    _bench.backend.recover()  # out here, where no traceback holds what ran any more
    return ArmFailure(arm, f"arms.{arm} ran out of memory: {said}")


def _on_backend(work: Callable[[Any], T]) -> T:
    try:
        return work(_bench.backend)
    except CAUGHT as error:
        said = shortage(error)
        if said is None:
            raise
        raise ShortageError(f"the engine ran out of memory before any arm: {said}; {WAY_OUT}") from None


@dataclass(frozen=True)
class Running:
    """A task on its way."""

    task: Task
    future: Future[ArmResult | ArmFailure | None]

    @property
    def error(self) -> BaseException | None:
        """What it ended with; to be asked of a task that is done."""
        return self.future.exception()


@contextmanager
def pool(study: Study, requests: tuple[Request, ...], arms: int, workers: int) -> Iterator[ArmPool]:
    """A pool of worker processes, which stop after their current request when the block is left by an exception."""
    method = "fork" if sys.platform == "linux" else "spawn"
    context = multiprocessing.get_context(method)
    counts = context.Array("q", arms, lock=False)  # one writer each
    stop = context.Value("b", 0, lock=False)
    given = (study, requests, counts, stop, os.getpid())
    arm_pool = ArmPool(lambda: ProcessPoolExecutor(workers, context, _start, given), workers, counts)
    try:
        yield arm_pool
    except BaseException:
        stop.value = 1
        arm_pool.executor.shutdown(wait=False, cancel_futures=True)
        raise
    finally:
        arm_pool.executor.shutdown()


class ArmPool:
    """Arms that are being run, and how far each one is."""

    def __init__(self, make: Callable[[], ProcessPoolExecutor], workers: int, counts: Any) -> None:
        self.executor, self._make, self._workers, self._counts = make(), make, workers, counts

    def on_backend(self, work: Callable[[Any], T]) -> T:
        """Do something with the backend where it is, before arms are set going."""
        return self.executor.submit(_on_backend, work).result()

    def start(self, tasks: list[Task]) -> list[Running]:
        """Set every task going."""
        return [self._submit(task) for task in tasks]

    def _submit(self, task: Task) -> Running:
        return Running(task, self.executor.submit(_run, task))

    def finish(
        self, running: list[Running], watch: Callable[[list[int]], None], period_s: float
    ) -> list[ArmResult | ArmFailure]:
        """Wait for every arm; `watch` sees the finished requests of each row every `period_s` seconds.

        An arm that fails is not gone on with. Returns how each row ended.
        """
        ends: dict[int, ArmResult | ArmFailure] = {}
        while running:
            wait([one.future for one in running], period_s, FIRST_COMPLETED)
            done = [one for one in running if one.future.done()]
            whole = [one for one in done if not isinstance(one.error, BrokenProcessPool)]
            for one in whole:
                end = one.future.result()  # an error ends the study now, not at its end
                if end is not None and not isinstance(ends.get(one.task.row), ArmFailure):
                    ends[one.task.row] = end
            lost = len(whole) < len(done)
            running = [one for one in running if one not in whole]
            if lost:
                at_work = running.pop(0).task
                ends[at_work.row] = self._killed(at_work.arm)
                running = [self._submit(one.task) for one in running if one.task.row != at_work.row]
            running = _without_failed(running, ends)
            watch(list(self._counts))
        return [ends[row] for row in sorted(ends)]

    def _killed(self, arm: str) -> ArmFailure:
        """Make new processes after one was killed; of several, nobody knows whose arm was too much."""
        if self._workers > 1:
            raise BrokenProcessPool
        self.executor.shutdown()
        self.executor = self._make()
        return ArmFailure(arm, f"arms.{arm} ended with its process, which was killed, most likely for memory")


def _without_failed(running: list[Running], ends: dict[int, ArmResult | ArmFailure]) -> list[Running]:
    """What is still worth waiting for: a failed arm's other tasks are given up where they have not begun."""
    return [one for one in running if not (isinstance(ends.get(one.task.row), ArmFailure) and one.future.cancel())]

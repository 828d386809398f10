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
from typing import Any, TypeVar

from spanlab.core.request import Request
from spanlab.settings import Study
from spanlab.shortage import CAUGHT, ShortageError, shortage
from spanlab.study.bounds import StudyBounds
from spanlab.study.cells import ArmFiles, Bench, run_arm
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


def _run(index: int, arm: str, files: ArmFiles) -> ArmResult | ArmFailure:
    def progress(finished: int) -> None:
        _counts[index] += finished
        if _stop.value:
            raise StoppedError

    try:
        run_arm(_bench, arm, files, progress)
        return read_arm(_bench.study, arm, files, _bounds)
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
        self._jobs: list[tuple[str, ArmFiles]] = []

    def on_backend(self, work: Callable[[Any], T]) -> T:
        """Do something with the backend where it is, before arms are set going."""
        return self.executor.submit(_on_backend, work).result()

    def start(self, jobs: list[tuple[str, ArmFiles]]) -> list[Future[ArmResult | ArmFailure]]:
        """Set every arm going."""
        self._jobs = jobs
        return [self._submit(index) for index in range(len(jobs))]

    def _submit(self, index: int) -> Future[ArmResult | ArmFailure]:
        return self.executor.submit(_run, index, *self._jobs[index])

    def finish(
        self, arms: list[Future[ArmResult | ArmFailure]], watch: Callable[[list[int]], None], period_s: float
    ) -> list[ArmResult | ArmFailure]:
        """Wait for every arm; `watch` sees the finished requests of each one every `period_s` seconds."""
        running = {arm: index for index, arm in enumerate(arms)}
        ends: dict[int, ArmResult | ArmFailure] = {}
        while running:
            done, _ = wait(running, period_s, FIRST_COMPLETED)
            whole = [arm for arm in done if not isinstance(arm.exception(), BrokenProcessPool)]
            ends |= {running.pop(arm): arm.result() for arm in whole}  # an error ends the study now, not at its end
            if len(whole) < len(done):
                at_work = min(running.values())
                ends[at_work] = self._killed(at_work)
                running = {self._submit(index): index for index in running.values() if index > at_work}
            watch(list(self._counts))
        return [ends[index] for index in range(len(arms))]

    def _killed(self, index: int) -> ArmFailure:
        """Make new processes after one was killed; of several, nobody knows whose arm was too much."""
        if self._workers > 1:
            raise BrokenProcessPool
        self.executor.shutdown()
        self.executor = self._make()
        arm = self._jobs[index][0]
        return ArmFailure(arm, f"arms.{arm} ended with its process, which was killed, most likely for memory")

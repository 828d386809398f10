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
from contextlib import contextmanager
from typing import Any

from spanlab.core.request import Request
from spanlab.settings import Study
from spanlab.shortage import CAUGHT, shortage
from spanlab.study.cells import ArmFiles, Bench, run_arm
from spanlab.study.results import ArmFailure, ArmResult, read_arm

# What a worker process works on; set once per process, because requests are large and arms are many.
_bench: Bench
_counts: Any
_stop: Any


class StoppedError(Exception):
    """The study was given up while this arm ran; what it had finished is kept."""


def _start(study: Study, requests: tuple[Request, ...], counts: Any, stop: Any, parent: int) -> None:
    global _bench, _counts, _stop
    _bench, _counts, _stop = Bench.of(study, requests), counts, stop
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
        return read_arm(_bench.study, arm, files)
    except CAUGHT as error:
        said = shortage(error)
        if said is None:
            raise
    _bench.backend.recover()  # out here, where no traceback holds what ran any more
    return ArmFailure(arm, f"arms.{arm} ran out of memory: {said}")


@contextmanager
def pool(study: Study, requests: tuple[Request, ...], arms: int, workers: int) -> Iterator[ArmPool]:
    """A pool of worker processes, which stop after their current request when the block is left by an exception."""
    method = "fork" if sys.platform == "linux" else "spawn"
    context = multiprocessing.get_context(method)
    counts = context.Array("q", arms, lock=False)  # one writer each
    stop = context.Value("b", 0, lock=False)
    with ProcessPoolExecutor(workers, context, _start, (study, requests, counts, stop, os.getpid())) as executor:
        try:
            yield ArmPool(executor, counts)
        except BaseException:
            stop.value = 1
            executor.shutdown(wait=False, cancel_futures=True)
            raise


class ArmPool:
    """Arms that are being run, and how far each one is."""

    def __init__(self, executor: ProcessPoolExecutor, counts: Any) -> None:
        self.executor, self._counts = executor, counts

    def start(self, jobs: list[tuple[str, ArmFiles]]) -> list[Future[ArmResult | ArmFailure]]:
        """Set every arm going."""
        return [self.executor.submit(_run, index, arm, files) for index, (arm, files) in enumerate(jobs)]

    def finish(
        self, arms: list[Future[ArmResult | ArmFailure]], watch: Callable[[list[int]], None], period_s: float
    ) -> list[ArmResult | ArmFailure]:
        """Wait for every arm; `watch` sees the finished requests of each one every `period_s` seconds."""
        waiting = set(arms)
        while waiting:
            done, waiting = wait(waiting, period_s, FIRST_COMPLETED)
            for arm in done:
                arm.result()  # an error ends the study now, not when all others are through
            watch(list(self._counts))
        return [arm.result() for arm in arms]

"""Where arms run: processes of this machine, this process, or the workers of a Dask scheduler."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from joblib.externals.loky import process_executor
from joblib.externals.loky.process_executor import ProcessPoolExecutor, TerminatedWorkerError

from spanlab.settings import ExecutorSettings
from spanlab.study.execution.worker import Worker

T = TypeVar("T")
W = TypeVar("W")
Given = ParamSpec("Given")


class Executor(ABC, Generic[W]):
    """Runs functions of a worker somewhere else, at most `lanes` at once.

    `lost`  the error of work whose process was killed
    """

    lost: type[Exception]

    def __init__(self, lanes: int) -> None:
        self._threads = ThreadPoolExecutor(lanes)

    def submit(
        self, work: Callable[Concatenate[W, Given], T], *arguments: Given.args, **named: Given.kwargs
    ) -> Future[T]:
        """Set `work(worker, *arguments)` going as soon as a lane is free."""
        return self._threads.submit(self._run, partial(work, **named), *arguments)

    def close(self, abandon: bool) -> None:
        """Wait for all work, or end it."""
        self._threads.shutdown(wait=not abandon, cancel_futures=abandon)
        self._end(abandon)
        self._threads.shutdown()

    @abstractmethod
    def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Wait for `work(worker, *arguments)`."""

    @abstractmethod
    def _end(self, abandon: bool) -> None:
        """Let the processes go, whatever they do if it is abandoned."""


@contextmanager
def executor(settings: ExecutorSettings, worker: W, processes: int) -> Iterator[Executor[W]]:
    """The executor of the settings; work is ended where the block is left by an exception."""
    made = _MADE[settings.kind](settings, worker, processes)
    try:
        yield made
    except BaseException:
        made.close(abandon=True)
        raise
    made.close(abandon=False)


def _cluster(settings: ExecutorSettings, worker: Worker, processes: int) -> Executor[Worker]:
    from spanlab.study.execution.cluster import Cluster  # which loads an optional package

    return Cluster(str(settings.address), worker)


class Here(Executor[W]):
    """This process, which does one thing after another; there is none to start, and none to be killed alone."""

    lost = TerminatedWorkerError

    def __init__(self, worker: W) -> None:
        self._worker = worker
        super().__init__(1)

    def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        return work(self._worker, *arguments)

    def _end(self, abandon: bool) -> None:
        pass


class Local(Executor[W]):
    """Processes of this machine; one that is killed takes its own task alone with it.

    Each is a loky executor of one process: one executor of many would end them all, and name none.
    """

    lost = TerminatedWorkerError

    def __init__(self, worker: W, processes: int) -> None:
        self._worker, self._ended = worker, False
        self._starting, self._made = threading.Lock(), dict[ProcessPoolExecutor, Future[int]]()
        self._idle = SimpleQueue[ProcessPoolExecutor]()
        for _ in range(processes):
            self._idle.put(self._start(_context()))
        super().__init__(processes)

    def _end(self, abandon: bool) -> None:
        with self._starting:
            self._ended = True
        for process, pid in self._made.items():
            if abandon:
                _kill(pid)
            process.shutdown()

    def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        process = self._idle.get()
        try:
            found: T = process.submit(_call, work, *arguments).result()
            return found
        except BrokenProcessPool as broken:
            process = self._start(None)  # by loky: a fork beside other threads would keep what they have open
            if _ended_in_its_answer(broken):
                raise TerminatedWorkerError("a process was killed") from broken
            raise
        finally:
            self._idle.put(process)

    def _start(self, context: Any) -> ProcessPoolExecutor:
        with self._starting:
            made = ProcessPoolExecutor(1, context=context, initializer=_begin, initargs=(self._worker, os.getpid()))
            if not self._ended:
                self._made[made] = made.submit(os.getpid)
                # Kept open here, it would let us wait for ever for the rest of what a killed process was writing.
                made._result_queue._writer.close()
            return made


def _kill(pid: Future[int]) -> None:
    """Kill a process from here: what loky kills while work is on its way there fails with a traceback."""
    with suppress(BrokenProcessPool, ProcessLookupError):
        os.kill(pid.result(), signal.SIGKILL)


def _ended_in_its_answer(broken: BrokenProcessPool) -> bool:
    """Whether a process was killed: loky takes the end of its answers for an answer that cannot be read."""
    why = str(broken.__cause__)
    return "EOFError" in why or "got end of file" in why


def _context() -> Any:
    """A fork shares the requests; None is loky's own start, the only one in a process that loky started."""
    forks = sys.platform == "linux" and multiprocessing.parent_process() is None and not _has_torch_threads()
    return multiprocessing.get_context("fork") if forks else None


def _has_torch_threads() -> bool:
    """Whether torch may have started threads here: a fork leaves them behind, and then waits for them in a product."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.get_num_threads() > 1


_worker: Any  # of this process


def _begin(worker: Any, parent: int) -> None:
    global _worker
    _worker = worker
    gc.freeze()  # what a fork brings along stays, so that no collection has to look through it
    process_executor._USE_PSUTIL = False  # or loky ends a process that grew by 300 MB, and with it a loaded model
    os.environ.setdefault("PYTHONFAULTHANDLER", "0")  # loky's needs a stderr that is a file
    for end in (signal.SIGINT, signal.SIGTERM):
        signal.signal(end, signal.SIG_IGN)  # the parent gets the same signal and ends the workers
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _call(work: Callable[..., T], *arguments: Any) -> T:
    return work(_worker, *arguments)


def _end_with(parent: int) -> None:
    """End this process when its parent is gone: killed, it could tell no worker, and those would hold the run."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


_MADE: dict[str, Callable[[ExecutorSettings, Any, int], Executor[Any]]] = {
    "local": lambda settings, worker, processes: Local(worker, processes),
    "here": lambda settings, worker, processes: Here(worker),
    "dask": _cluster,
}

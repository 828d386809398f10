"""Executors of arms: processes of this machine, this process, or the workers of a Dask scheduler."""

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

from spanlab.plugins import named_errors
from spanlab.settings import ExecutorSettings
from spanlab.study.execution.worker import Worker

T = TypeVar("T")
W = TypeVar("W")
P = ParamSpec("P")


class Executor(ABC, Generic[W]):
    """Runs functions of a worker, at most `lanes` at once.

    `lost`  type of the error that is raised where the process was killed
    """

    lost: type[Exception]

    def __init__(self, lanes: int) -> None:
        self._threads = ThreadPoolExecutor(lanes)

    def submit(self, work: Callable[Concatenate[W, P], T], *arguments: P.args, **named: P.kwargs) -> Future[T]:
        """Start `work(worker, *arguments)` as soon as a lane is free."""
        return self._threads.submit(self._run, partial(_with_named_errors, work, **named), *arguments)

    def close(self, abandon: bool) -> None:
        """Wait for all work, or kill it where `abandon` is true."""
        self._threads.shutdown(wait=not abandon, cancel_futures=abandon)
        self._stop(abandon)
        self._threads.shutdown()

    @abstractmethod
    def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run `work(worker, *arguments)` and wait for its result."""

    @abstractmethod
    def _stop(self, abandon: bool) -> None:
        """Stop the processes; where `abandon` is true, also those that are busy."""


def _with_named_errors(work: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Run `work` in its process, where the traceback of an error still has the frames of plugins."""
    with named_errors():
        return work(*arguments, **named)


@contextmanager
def executor(settings: ExecutorSettings, worker: W, processes: int) -> Iterator[Executor[W]]:
    """The executor of the settings; an exception in the block kills all work."""
    pool = _EXECUTORS[settings.kind](settings, worker, processes)
    try:
        yield pool
    except BaseException:
        pool.close(abandon=True)
        raise
    pool.close(abandon=False)


def _cluster(settings: ExecutorSettings, worker: Worker, processes: int) -> Executor[Worker]:
    from spanlab.study.execution.cluster import Cluster  # loads an optional package

    return Cluster(str(settings.address), worker)


class Here(Executor[W]):
    """Runs work in this process, one call at a time."""

    lost = TerminatedWorkerError

    def __init__(self, worker: W) -> None:
        self._worker = worker
        super().__init__(1)

    def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        return work(self._worker, *arguments)

    def _stop(self, abandon: bool) -> None:
        pass


class Local(Executor[W]):
    """Processes of this machine; a killed process fails only its task.

    Each process is a loky executor with one worker: an executor with many workers would stop all of them, and would not
    report which task was lost.
    """

    lost = TerminatedWorkerError

    def __init__(self, worker: W, processes: int) -> None:
        self._worker, self._ended = worker, False
        self._starting, self._processes = threading.Lock(), dict[ProcessPoolExecutor, Future[int]]()
        self._idle = SimpleQueue[ProcessPoolExecutor]()
        for _ in range(processes):
            self._idle.put(self._start(_context()))
        super().__init__(processes)

    def _stop(self, abandon: bool) -> None:
        with self._starting:
            self._ended = True
        for process, pid in self._processes.items():
            if abandon:
                _kill(pid)
            process.shutdown()

    def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        process = self._idle.get()
        try:
            result: T = process.submit(_call, work, *arguments).result()
            return result
        except BrokenProcessPool as broken:
            process = self._start(None)  # by loky: a fork next to other threads would inherit their open files
            if _was_killed(broken):
                raise TerminatedWorkerError("a process was killed") from broken
            raise
        finally:
            self._idle.put(process)

    def _start(self, context: Any) -> ProcessPoolExecutor:
        with self._starting:
            process = ProcessPoolExecutor(
                1, context=context, initializer=_initialize_process, initargs=(self._worker, os.getpid())
            )
            if not self._ended:
                self._processes[process] = process.submit(os.getpid)
                # An open writer here would block the reader for ever on the partial answer of a killed process.
                process._result_queue._writer.close()
            return process


def _kill(pid: Future[int]) -> None:
    """Kill a process directly: loky's own kill prints a traceback where work is being sent to the process."""
    with suppress(BrokenProcessPool, ProcessLookupError):
        os.kill(pid.result(), signal.SIGKILL)


def _was_killed(broken: BrokenProcessPool) -> bool:
    """Whether the process was killed: loky reports the end of the result pipe as an unreadable result."""
    cause = str(broken.__cause__)
    return "EOFError" in cause or "got end of file" in cause


def _context() -> Any:
    """Start method: `fork`, which shares the requests; None is loky's own, the only one in a process of loky."""
    forks = sys.platform == "linux" and multiprocessing.parent_process() is None and not _has_torch_threads()
    return multiprocessing.get_context("fork") if forks else None


def _has_torch_threads() -> bool:
    """Whether torch may have started threads: a forked child lacks them, and its matrix products wait for ever."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.get_num_threads() > 1


_worker: Any  # worker of this process


def _initialize_process(worker: Any, parent: int) -> None:
    global _worker
    _worker = worker
    gc.freeze()  # objects inherited by a fork stay alive: no collection needs to visit them
    process_executor._USE_PSUTIL = False  # else loky stops a process that grew by 300 MB, such as one with a model
    os.environ.setdefault("PYTHONFAULTHANDLER", "0")  # loky's fault handler needs a stderr that is a file
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent gets the same signal and stops the workers
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()


def _call(work: Callable[..., T], *arguments: Any) -> T:
    return work(_worker, *arguments)


def _exit_with_parent(parent: int) -> None:
    """Exit when the parent is gone: a killed parent cannot stop its workers, which would hold the run's lock."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


_EXECUTORS: dict[str, Callable[[ExecutorSettings, Any, int], Executor[Any]]] = {
    "local": lambda settings, worker, processes: Local(worker, processes),
    "here": lambda settings, worker, processes: Here(worker),
    "dask": _cluster,
}

"""Worker of one process: runs tasks of one study and caches the objects that its arms share."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import numpy as np
from joblib.externals.loky import process_executor
from joblib.externals.loky.process_executor import ProcessPoolExecutor, TerminatedWorkerError

from spanlab.core.placement.rules import PlacementError
from spanlab.core.request import Request
from spanlab.engine.settings import MissingBaselineError
from spanlab.errors import CAUGHT, OutOfMemoryError, out_of_memory
from spanlab.plugins import load_plugins, named_errors
from spanlab.settings.analyses import ANALYSES, ARMS
from spanlab.settings.server import ExecutorSettings
from spanlab.settings.study import Study
from spanlab.study.backends import BACKENDS, RealEngine
from spanlab.study.bounds import REMEDY, ArmFailure, ArmResult, StudyBounds, read_arm
from spanlab.study.jobs import Jobs, Runtime, Task, calibration_of, designed_workload, run_arm, run_cells
from spanlab.study.numbers import RunCell

Outcome = ArmResult | ArmFailure | None
READING_PERIOD_S = 60.0  # between readings of the machine while tasks alternate


class StoppedError(Exception):
    """The study was cancelled while this arm ran; finished cells stay in the files."""


def always_active() -> bool:
    """Return True: a process of this machine ends with its study, so that its task is always active."""
    return True


def _received(_: list[Callable[..., Any]], plugins: list[str], study: bytes, *more: Any) -> Worker:
    load_plugins(plugins)  # first: settings may be of classes of a plugin
    return Worker(pickle.loads(study), *more)


class Worker:
    """Worker that is sent to a process once; it caches the objects that it builds there.

    `counts`     file of the number of finished requests of each row, int64
    `is_active`  whether the study still waits for the running task
    """

    def __init__(
        self, study: Study, requests: tuple[Request, ...], counts: Path, is_active: Callable[[], bool] = always_active
    ) -> None:
        self.study, self.requests, self.counts, self.is_active = study, requests, counts, is_active
        load_plugins(study.plugins)

    def __reduce__(self) -> tuple[Any, ...]:
        """Name the functions of the analyses first: reading them registers the analyses there."""
        functions = [ANALYSES[name].run for name in ANALYSES if not ANALYSES.is_plugin(name)]
        state = pickle.dumps(self.study), self.requests, self.counts, self.is_active
        return _received, (functions, self.study.plugins, *state)

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
        other_requests = [row["requests"] for row in task.files.finished() if RunCell.of(row) not in task.cells]
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
        expected = run_cells(self.study, task.arm)
        if missing := set(expected) - {RunCell.of(row) for row in task.files.finished()}:
            raise ValueError(
                f"arms.{task.arm}: {task.files.runs} lacks {len(missing)} of {len(expected)} finished runs; expected "
                "a folder that nothing else changes until the study ends"
            )
        task.files.sort_cells(expected)
        if not self.study.needs(ARMS):
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


# ------------------------------------------------------------------------------
# Executors of arms: processes of this machine, this process, or the workers of a Dask
# scheduler.
# ------------------------------------------------------------------------------

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
    from spanlab.study.cluster import Cluster  # loads an optional package

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
    if not forks:
        return None
    import scipy.optimize  # noqa: F401 - of the offline bounds: once here, and not in each process

    return multiprocessing.get_context("fork")


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


# ------------------------------------------------------------------------------
# The arms of a study on an executor: start, progress and outcomes.
# ------------------------------------------------------------------------------

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

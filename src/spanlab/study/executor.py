"""The executor of a study: processes of this machine, this process, or Dask workers."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from functools import cache, lru_cache, partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, Self, TypeVar, TypeVarTuple, cast
from uuid import uuid4

import cloudpickle

from spanlab.compiled import VARIABLE, is_used
from spanlab.errors import is_user_error, sentence
from spanlab.provenance import commit
from spanlab.registry import PACKAGES, load_plugins, named_errors
from spanlab.settings.server import ExecutorSettings

KILLED = "was killed, most likely because memory ran out"
_LOST = f"workers: a process {KILLED}; expected more memory or fewer workers=N"

T = TypeVar("T")
W = TypeVar("W")
Ts = TypeVarTuple("Ts")


class ProcessKilledError(ValueError):
    """The process that ran the work was killed."""


class StoppedError(Exception):
    """The executor was left while the work ran."""


class Executor(ABC, Generic[W]):
    """Runs functions of a worker, at most `lanes` at once.

    The end of a `with` block waits for all work; an exception in the block ends all work at once.
    """

    def __init__(self, worker: W, lanes: int) -> None:
        self.worker = worker
        self._threads = ThreadPoolExecutor(lanes)

    def submit(self, work: Callable[[W, *Ts], T], *arguments: *Ts) -> Future[T]:
        """Start `work(worker, *arguments)` as soon as a lane is free.

        The future has the error that `work` raises, or ProcessKilledError.
        """
        return self._threads.submit(self._run, partial(_named, work), *arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        abandon = kind is not None
        self._threads.shutdown(wait=not abandon, cancel_futures=abandon)
        self._stop(abandon)
        self._threads.shutdown()

    @abstractmethod
    def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run `work(worker, *arguments)` and wait for its result."""

    @abstractmethod
    def _stop(self, abandon: bool) -> None:
        """Stop the processes; where `abandon` is true, also those that are busy."""


def _named(work: Callable[..., T], *arguments: Any) -> T:
    """Run `work` in its process, where the traceback of an error has the frames of plugins."""
    with named_errors():
        return work(*arguments)


_is_active: ContextVar[Callable[[], bool]] = ContextVar("_is_active", default=lambda: True)


def check_active() -> None:
    """Raise StoppedError in work whose executor was left; a process of this machine is killed."""
    if not _is_active.get()():
        raise StoppedError


class Here(Executor[W]):
    """Runs work in this process, one call at a time."""

    def __init__(self, worker: W) -> None:
        super().__init__(worker, 1)
        self._ended = False

    def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        _is_active.set(lambda: not self._ended)
        return work(self.worker, *arguments)

    def _stop(self, abandon: bool) -> None:
        self._ended = True


# ------------------------------------------------------------------------------
# Work in another process: a task is a pickled function with its arguments, and its answer is
# the pickled result or error.
# ------------------------------------------------------------------------------


def _pack(worker: object, plugins: Sequence[str]) -> bytes:
    """Pickle a worker, and name what a fresh process imports before it can read and use it.

    Files of this program register entries, analyses and kinds when they are imported.
    """
    modules = [name for name in list(sys.modules) if name.partition(".")[0] in PACKAGES]
    return pickle.dumps((modules, list(plugins), cloudpickle.dumps(worker)))


def _unpack(packed: bytes) -> Any:
    modules, plugins, worker = pickle.loads(packed)
    for name in modules:
        import_module(name)
    load_plugins(plugins)
    return pickle.loads(worker)


def _answer(worker: Callable[[], Any], task: bytes) -> bytes:
    try:
        loaded = worker()  # before the task, which may be of classes of a plugin
        work, arguments = pickle.loads(task)
        return bytes(cloudpickle.dumps((work(loaded, *arguments), None, "")))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        try:
            answer = bytes(cloudpickle.dumps((None, error, text)))
            pickle.loads(answer)
            return answer
        except Exception:  # of a class of a user, whose attributes or arguments cannot be sent
            kind = ValueError if is_user_error(error) else RuntimeError
            return pickle.dumps((None, kind(f"{type(error).__name__}: {sentence(error)}"), text))


def _result(answer: bytes) -> Any:
    result, error, text = pickle.loads(answer)
    if error is not None:
        raise error from RuntimeError(f"in its process:\n{text}")
    return result


# ------------------------------------------------------------------------------
# Processes of this machine.
#
# A pipe for each process: pools of libraries share one queue, in which the half-written answer
# of a killed process blocks the others, and they stop all processes when one is killed.
# ------------------------------------------------------------------------------


class _Process(NamedTuple):
    """A process with a worker; `pipe` ends when the process does."""

    pipe: Connection
    kill: Callable[[], object]
    join: Callable[[], object]

    def ask(self, *messages: bytes) -> bytes:
        try:
            for message in messages:
                self.pipe.send_bytes(message)
            return self.pipe.recv_bytes()
        except (EOFError, OSError) as end:
            raise ProcessKilledError(_LOST) from end


class Local(Executor[W]):
    """Processes of this machine; a killed process fails only its work, and is replaced."""

    def __init__(self, worker: W, processes: int, plugins: Sequence[str]) -> None:
        self._pack = cache(partial(_pack, worker, plugins))
        self._starting, self._ended = threading.Lock(), False
        self._processes: list[_Process] = []
        self._idle = SimpleQueue[_Process | None]()  # None: start one
        forks = _can_fork()
        if forks and processes > 1:
            import scipy.optimize  # noqa: F401 - of the offline bounds: once here, not in each process
        try:
            for _ in range(processes):
                self._idle.put(self._start(partial(_fork, worker)) if forks else None)
        except BaseException:
            self._stop(abandon=True)
            raise
        super().__init__(worker, processes)  # its threads start later: a fork would lack them

    def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        task = cloudpickle.dumps((work, arguments))
        process, usable, first = self._idle.get(), None, tuple[bytes, ...]()
        try:
            if process is None:
                process, first = self._start(_spawn), (self._pack(),)
            answer = process.ask(*first, task)
            usable = process
        finally:
            self._idle.put(usable)
        return cast(T, _result(answer))

    def _start(self, start: Callable[[Connection], tuple[Any, Any]]) -> _Process:
        with self._starting:
            if self._ended:
                raise StoppedError
            ours, theirs = multiprocessing.Pipe()
            # A new process inherits the mask: this process gets the same signals, and stops it.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
            try:
                process = _Process(ours, *start(theirs))
                self._processes.append(process)
            finally:
                theirs.close()  # else the pipe would not end with the process
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return process

    def _stop(self, abandon: bool) -> None:
        with self._starting:
            self._ended = True
        for process in self._processes:
            if abandon:
                process.kill()
            with suppress(OSError):  # it has ended
                process.pipe.send_bytes(b"")
        for process in self._processes:
            process.join()


def _can_fork() -> bool:
    """Whether processes start as forks, which share the requests and need no imports.

    Threads of torch do not: a forked process lacks them, and its matrix products wait for ever.
    """
    torch = sys.modules.get("torch")
    return sys.platform == "linux" and (torch is None or torch.get_num_threads() <= 1)


def _fork(worker: object, pipe: Connection) -> tuple[Any, Any]:
    arguments = pipe, os.getpid(), lambda: worker
    process = multiprocessing.get_context("fork").Process(target=serve, args=arguments)
    process.start()
    return process.kill, process.join


def _spawn(pipe: Connection) -> tuple[Any, Any]:
    """Start a fresh process.

    Python's own start methods run the script of the parent again, which may start a study.
    """
    paths, number = [str(path) for path in sys.path], pipe.fileno()
    call = f"executor.serve(executor.Connection({number}), {os.getpid()})"
    command = f"import sys; sys.path[:] = {paths}; from spanlab.study import executor; {call}"
    process = subprocess.Popen(
        [sys.executable, "-c", command], stdin=subprocess.DEVNULL, pass_fds=[number]
    )
    return process.kill, process.wait


def serve(pipe: Connection, parent: int, worker: Callable[[], Any] | None = None) -> None:
    """Answer tasks up to an empty one; without a worker, the first message is the packed one.

    `parent`  its process id
    """
    gc.freeze()  # objects inherited by a fork stay alive: no collection needs to visit them
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    with suppress(EOFError, OSError):  # the parent has ended
        worker = worker or cache(partial(_unpack, pipe.recv_bytes()))
        while task := pipe.recv_bytes():
            pipe.send_bytes(_answer(worker, task))


def _exit_with(parent: int) -> None:
    """Exit when the parent is gone: a killed parent cannot stop what holds the lock of its run."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


# ------------------------------------------------------------------------------
# Workers of a Dask scheduler.
# ------------------------------------------------------------------------------

_CONNECT_S = 10
_task_lock = threading.Lock()  # a Dask worker may have threads; arms share what a process computed


class Dask(Executor[W]):
    """Dask workers, which run the same commit and see `folder` under the same path.

    Each worker runs one task at a time: Dask suspects every task of a killed worker, and fails
    tasks that it suspects too often.
    """

    def __init__(self, address: str, worker: W, plugins: Sequence[str], folder: Path) -> None:
        from distributed import Client  # an optional package

        try:
            self._client: Any = Client(address, timeout=_CONNECT_S, set_as_default=False)
        except (OSError, ValueError) as error:
            expected = f"expected a Dask scheduler that answers ({error})"
            raise ValueError(f"executor.address={address}: {expected}") from error
        try:
            lanes = _check_workers(self._client, address, folder)
            # in a file: data on Dask workers would be lost with their processes
            self._file, self._plugins = folder / f"worker-{uuid4().hex}", list(plugins)
            self._file.write_bytes(_pack(worker, plugins))
        except BaseException:
            self._client.close()
            raise
        super().__init__(worker, lanes)
        self._running = set[Any]()

    def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        from distributed import KilledWorker

        task = cloudpickle.dumps((work, arguments))
        future = self._client.submit(_answer_on_dask, self._file, self._plugins, task, pure=False)
        self._running.add(future)
        try:
            return cast(T, _result(future.result()))
        except KilledWorker as error:
            raise ProcessKilledError(_LOST) from error
        finally:
            self._running.discard(future)

    def _stop(self, abandon: bool) -> None:
        self._client.cancel(list(self._running))
        self._client.close()


def _check_workers(client: Any, address: str, folder: Path) -> int:
    """Raise where a worker runs other code or does not see the folder; return their number."""
    states = client.run(_worker_state, folder)
    key, ours = f"executor.address={address}", commit()
    if not states:
        raise ValueError(f"{key}: expected one worker or more, the scheduler has none")
    for worker, (revision, compiled, sees) in states.items():
        if revision != ours:
            raise ValueError(f"{key}: worker {worker} runs commit {revision}, expected {ours}")
        if compiled != is_used():
            mode = f"{VARIABLE}={'auto' if is_used() else 'never'}"
            runs = f"worker {worker} runs other modules than this process"
            raise ValueError(f"compiled: {runs}, expected {mode} there")
        if not sees:
            expected = f"expected a folder that all workers see, {worker} does not see {folder}"
            raise ValueError(f"output.root: {expected}")
    return len(states)


def _worker_state(folder: Path) -> tuple[str, bool, bool]:
    return commit(), is_used(), folder.exists()


@lru_cache(maxsize=2)
def _read(file: Path) -> Any:
    return _unpack(file.read_bytes())


def _answer_on_dask(file: Path, plugins: list[str], task: bytes) -> bytes:
    _is_active.set(_is_executing)

    def worker() -> Any:
        loaded = _read(file)
        load_plugins(plugins)  # another study may have used this process in between
        return loaded

    with _task_lock:
        return _answer(worker, task)


def _is_executing() -> bool:
    """Whether the current Dask task still is; False after the study was cancelled or killed."""
    from distributed import get_worker

    worker = get_worker()
    task = worker.state.tasks.get(worker.get_current_task())
    return task is not None and task.state == "executing"


def executor(
    settings: ExecutorSettings,
    worker: W,
    processes: int,
    plugins: Sequence[str] = (),
    folder: Path | None = None,
) -> Executor[W]:
    """Return the executor of the settings, for a `with` block; ValueError where none can run.

    `plugins`  loaded in every process
    `folder`   folder that all processes see, on every machine; of Dask only
    """
    match settings.kind:
        case "here":
            return Here(worker)
        case "dask":
            assert folder is not None, "lanes of a sweep are processes of this machine"
            return Dask(str(settings.address), worker, plugins, folder)
    return Local(worker, processes, plugins)

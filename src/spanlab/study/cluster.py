"""Executor on the workers of a Dask scheduler; the only module that loads `distributed`."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from distributed import Client, KilledWorker, get_worker

from spanlab.compiled import VARIABLE, is_used
from spanlab.plugins import load_plugins
from spanlab.provenance import commit
from spanlab.study.worker import Executor, Worker

T = TypeVar("T")

_task_lock = threading.Lock()  # a worker may have several threads, and arms share what their process computed
_CONNECT_S = 10


class Cluster(Executor[Worker]):
    """Dask workers, which must run the same commit and see the run's folder under the same path.

    Each worker runs one task at a time: Dask suspects every task of a killed worker, and fails tasks that it suspects
    too often.
    """

    lost = KilledWorker

    def __init__(self, address: str, worker: Worker) -> None:
        self._client, self._running = _connect(address), set[Any]()
        try:
            super().__init__(_check_workers(self._client, address, worker.counts))
            self._worker_file = _write_worker(worker)
        except BaseException:
            self._client.close()
            raise

    def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        future = self._client.submit(_call, self._worker_file, work, *arguments, pure=False)
        self._running.add(future)
        try:
            result: T = future.result()
            return result
        finally:
            self._running.discard(future)

    def _stop(self, abandon: bool) -> None:
        self._client.cancel(list(self._running))
        self._client.close()


def _connect(address: str) -> Any:
    try:
        return Client(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"executor.address={address}: expected a Dask scheduler that answers ({error})") from error


def _check_workers(client: Any, address: str, file: Path) -> int:
    """Raise where a worker runs other code or does not see a file of the run; return the number of workers."""
    states = client.run(_worker_state, file)
    if not states:
        raise ValueError(f"executor.address={address}: expected one worker or more, the scheduler has none")
    expected = commit()
    for worker, (revision, compiled, sees) in states.items():
        if revision != expected:
            raise ValueError(f"executor.address={address}: worker {worker} runs commit {revision}, expected {expected}")
        if compiled != is_used():
            mode = f"{VARIABLE}={'auto' if is_used() else 'never'}"
            raise ValueError(f"compiled: worker {worker} runs other modules than this process, expected {mode} there")
        if not sees:
            raise ValueError(f"output.root: expected a folder that all workers see, {worker} does not see {file}")
    return len(states)


def _worker_state(file: Path) -> tuple[str, bool, bool]:
    return commit(), is_used(), file.exists()


def _write_worker(worker: Worker) -> Path:
    """Pickle the worker to a file and return its path; data on Dask workers would be lost with their processes."""
    file = worker.counts.with_name(f"worker-{uuid4().hex}")
    file.write_bytes(pickle.dumps(Worker(worker.study, worker.requests, worker.counts, _is_running)))
    return file


@lru_cache(maxsize=2)
def _load_worker(file: Path) -> Worker:
    worker: Worker = pickle.loads(file.read_bytes())
    return worker


def _call(file: Path, work: Callable[..., T], *arguments: Any) -> T:
    with _task_lock:
        worker = _load_worker(file)
        load_plugins(worker.study.plugins)  # another study may have used this process in between
        return work(worker, *arguments)


def _is_running() -> bool:
    """Whether the current task is still executing; False after the study was cancelled or killed."""
    worker = get_worker()
    task = worker.state.tasks.get(worker.get_current_task())
    return task is not None and task.state == "executing"

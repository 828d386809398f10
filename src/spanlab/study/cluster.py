"""The workers of a Dask scheduler as an executor; the only module that loads `distributed`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from distributed import Client, get_worker
from distributed.scheduler import KilledWorker

from spanlab.study.folder import CONFIG
from spanlab.study.provenance import commit
from spanlab.study.worker import Worker

T = TypeVar("T")

_one = threading.Lock()  # a worker may have several threads, and arms share what their process computed
_CONNECT_S = 10


class Cluster:
    """Dask's workers; they run this checkout and see the run's folder under the same path."""

    lost = KilledWorker

    def __init__(self, address: str, worker: Worker) -> None:
        self._client = _connected(address)
        try:
            _check(self._client, address, worker.counts.parent)
            there = Worker(worker.study, worker.requests, worker.counts, _wanted)
            self._worker = self._client.scatter(there, broadcast=True, hash=False)
            self._futures = self._client.get_executor(pure=False)
        except BaseException:
            self._client.close()
            raise

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Set `work(worker, *arguments)` going on one of the workers."""
        future: Future[T] = self._futures.submit(_call, work, self._worker, *arguments)
        return future

    def close(self, abandon: bool) -> None:
        """Leave the scheduler, which drops the work that is not finished."""
        self._client.close()


def _connected(address: str) -> Any:
    try:
        return Client(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"executor.address={address}: expected a Dask scheduler that answers ({error})") from error


def _check(client: Any, address: str, folder: Path) -> None:
    """Refuse workers that run other code or do not see the folder."""
    found = client.run(_look, folder)
    if not found:
        raise ValueError(f"executor.address={address}: expected one worker or more, the scheduler has none")
    own = commit()
    for worker, (code, sees) in found.items():
        if code != own:
            raise ValueError(f"executor.address={address}: worker {worker} runs commit {code}, expected {own}")
        if not sees:
            raise ValueError(f"output.root: expected a folder that all workers see, {worker} does not see {folder}")


def _look(folder: Path) -> tuple[str, bool]:
    return commit(), (folder / CONFIG).exists()


def _call(work: Callable[..., T], worker: Worker, *arguments: Any) -> T:
    with _one:
        return work(worker, *arguments)


def _wanted() -> bool:
    """Whether the scheduler still wants the running task: not after the study was given up or killed."""
    worker = get_worker()
    task = worker.state.tasks.get(worker.get_current_task())
    return task is not None and task.state == "executing"

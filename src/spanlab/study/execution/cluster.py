"""The workers of a Dask scheduler as an executor; the only module that loads `distributed`."""

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
from spanlab.study.execution.executors import Executor
from spanlab.study.execution.worker import Worker
from spanlab.study.output.provenance import commit

T = TypeVar("T")

_one = threading.Lock()  # a worker may have several threads, and arms share what their process computed
_CONNECT_S = 10


class Cluster(Executor[Worker]):
    """Dask's workers; they run this checkout and see the run's folder under the same path.

    One task per worker at once: Dask suspects every task of a killed worker, and gives up those it suspects too often.
    """

    lost = KilledWorker

    def __init__(self, address: str, worker: Worker) -> None:
        self._client, self._running = _connected(address), set[Any]()
        try:
            super().__init__(_checked(self._client, address, worker.counts))
            self._sent = _send(worker)
        except BaseException:
            self._client.close()
            raise

    def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        future = self._client.submit(_call, self._sent, work, *arguments, pure=False)
        self._running.add(future)
        try:
            done: T = future.result()
            return done
        finally:
            self._running.discard(future)

    def _end(self, abandon: bool) -> None:
        self._client.cancel(list(self._running))
        self._client.close()


def _connected(address: str) -> Any:
    try:
        return Client(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"executor.address={address}: expected a Dask scheduler that answers ({error})") from error


def _checked(client: Any, address: str, file: Path) -> int:
    """Refuse workers that run other code or do not see a file of the run; returns how many there are."""
    found = client.run(_look, file)
    if not found:
        raise ValueError(f"executor.address={address}: expected one worker or more, the scheduler has none")
    own = commit()
    for worker, (code, compiled, sees) in found.items():
        if code != own:
            raise ValueError(f"executor.address={address}: worker {worker} runs commit {code}, expected {own}")
        if compiled != is_used():
            mode = f"{VARIABLE}={'auto' if is_used() else 'never'}"
            raise ValueError(f"compiled: worker {worker} runs other modules than this process, expected {mode} there")
        if not sees:
            raise ValueError(f"output.root: expected a folder that all workers see, {worker} does not see {file}")
    return len(found)


def _look(file: Path) -> tuple[str, bool, bool]:
    return commit(), is_used(), file.exists()


def _send(worker: Worker) -> Path:
    """A file, not data of the scheduler's, which would be lost with the processes that hold it."""
    sent = worker.counts.with_name(f"worker-{uuid4().hex}")
    sent.write_bytes(pickle.dumps(Worker(worker.study, worker.requests, worker.counts, _wanted)))
    return sent


@lru_cache(maxsize=2)
def _received(sent: Path) -> Worker:
    worker: Worker = pickle.loads(sent.read_bytes())
    return worker


def _call(sent: Path, work: Callable[..., T], *arguments: Any) -> T:
    with _one:
        worker = _received(sent)
        load_plugins(worker.study.plugins)  # another study may have worked here in between
        return work(worker, *arguments)


def _wanted() -> bool:
    """Whether the scheduler still wants the running task: not after the study was given up or killed."""
    worker = get_worker()
    task = worker.state.tasks.get(worker.get_current_task())
    return task is not None and task.state == "executing"

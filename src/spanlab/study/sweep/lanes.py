"""Lanes that run points of a sweep concurrently, where a study has fewer arms than there are cores."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from spanlab import build
from spanlab.errors import is_user_error, sentence
from spanlab.settings import ExecutorSettings, Study, WorkloadSettings, worker_count
from spanlab.study.execution.arms import KILLED
from spanlab.study.execution.executors import Executor, executor
from spanlab.study.numbers.results import ArmsFailedError, BarMissedError
from spanlab.study.progress import print_line
from spanlab.study.run import Host, run_study
from spanlab.workloads import Workload


class LastWorkload:
    """`build_workload` with a cache of the last result."""

    def __init__(self) -> None:
        self._last_arguments: Any = None
        self._last: Workload | None = None

    def __call__(self, settings: WorkloadSettings, cache_dir: str, serves: bool = True) -> Workload:
        """Return the workload of these settings."""
        arguments = asdict(settings), cache_dir, serves
        if self._last is None or arguments != self._last_arguments:
            self._last = None  # else both would be in memory
            self._last_arguments, self._last = arguments, build.build_workload(settings, cache_dir, serves)
        return self._last


@dataclass(frozen=True)
class PointOutcome:
    """Outcome of a point: `ran` where its run folder is complete; `failure` is one sentence, or empty."""

    ran: bool
    failure: str = ""


class Lane:
    """Runs points one after another, and loads the workload once for consecutive points that share it.

    `concurrent`  other lanes run at the same time: progress bars would overwrite one another
    """

    def __init__(self, name: str, root: Path, concurrent: bool) -> None:
        self._arguments = name, root, concurrent
        self._name, self._root = name, root
        self._host = Host(LastWorkload(), Console(stderr=True, force_terminal=False if concurrent else None))

    def __reduce__(self) -> tuple[Any, ...]:
        return Lane, self._arguments

    def run(self, study: Study, point: str) -> PointOutcome:
        """Run the study of a point; `point` is its name in messages."""
        try:
            run_study(study, self._name, self._root, show=False, host=self._host)
        except (ArmsFailedError, BarMissedError) as error:
            return PointOutcome(True, f"{point}: {error}")  # the run folder is complete
        except Exception as mistake:  # all but user errors are raised again
            if not is_user_error(mistake):
                raise
            text = f"{point}: {sentence(mistake)}"
            print_line(self._host.console, f"failed: {text}")
            return PointOutcome(False, text)
        return PointOutcome(True)

    def run_here(self, study: Study, point: str) -> PointOutcome:
        """Run the study of a point with all its arms in this process."""
        study.executor, study.workers = ExecutorSettings("here"), None
        return self.run(study, point)


class ConcurrentPoints:
    """Points that run concurrently; each starts as soon as a lane is free."""

    def __init__(self, lanes: Executor[Lane]) -> None:
        self._lanes, self._running = lanes, dict[str, Future[PointOutcome]]()

    def start(self, study: Study, point: str) -> None:
        """Submit a point; `point` is its name."""
        self._running[point] = self._lanes.submit(Lane.run_here, study, point)

    def outcomes(self) -> dict[str, PointOutcome]:
        """Wait for all points, and return their outcomes by name."""
        return {point: self._outcome(point, future) for point, future in self._running.items()}

    def _outcome(self, point: str, future: Future[PointOutcome]) -> PointOutcome:
        try:
            return future.result()
        except self._lanes.lost:
            return PointOutcome(False, f"{point}: its process {KILLED}")


class SequentialPoints:
    """Points that run one by one in this process, with the executor of their study."""

    def __init__(self, lane: Lane) -> None:
        self._lane, self._outcomes = lane, dict[str, PointOutcome]()

    def start(self, study: Study, point: str) -> None:
        """Run a point; `point` is its name."""
        self._outcomes[point] = self._lane.run(study, point)

    def outcomes(self) -> dict[str, PointOutcome]:
        """Return the outcomes by name."""
        return self._outcomes


@contextmanager
def points_of(study: Study, count: int, name: str, root: Path) -> Iterator[ConcurrentPoints | SequentialPoints]:
    """The runner of `count` points of a study: concurrent where the arms of one point would leave cores idle."""
    lanes = _lanes(study, count)
    if lanes == 1:
        yield SequentialPoints(Lane(name, root, concurrent=False))
        return
    with executor(ExecutorSettings(), Lane(name, root, concurrent=True), lanes) as pool:
        yield ConcurrentPoints(pool)


def _lanes(study: Study, count: int) -> int:
    """Number of concurrent points: as many as leave each arm a core."""
    arms = max(1, len(study.chosen()))
    return 1 if study.executor.kind == "dask" else max(1, worker_count(study, count * arms) // arms)

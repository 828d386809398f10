"""Points of a sweep side by side, where a study has fewer arms than there are cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from spanlab import build
from spanlab.errors import USER_ERRORS
from spanlab.settings import ExecutorSettings, Study, WorkloadSettings, worker_count
from spanlab.study.execution.arms import KILLED
from spanlab.study.execution.executors import Executor, executor
from spanlab.study.numbers.results import ArmsFailedError, BarMissedError
from spanlab.study.progress import say
from spanlab.study.run import Host, run_study
from spanlab.workloads import Workload


class LastWorkload:
    """`build_workload` that hands out what it returned last again where all arguments are equal."""

    def __init__(self) -> None:
        self._asked: Any = None
        self._last: Workload | None = None

    def __call__(self, settings: WorkloadSettings, cache_dir: str, serves: bool = True) -> Workload:
        """The workload of these settings."""
        asked = asdict(settings), cache_dir, serves
        if self._last is None or asked != self._asked:
            self._last = None  # or both would be in memory at once
            self._asked, self._last = asked, build.build_workload(settings, cache_dir, serves)
        return self._last


@dataclass(frozen=True)
class Ended:
    """How a point ended: whether its run is there, and what failed in one sentence; empty where nothing did."""

    ran: bool
    failure: str = ""


class Lane:
    """Runs points one after another, and loads a workload once for those that follow one another.

    `explain`  a mistake as one sentence
    `beside`   other lanes run beside it: their bars would overwrite one another
    """

    def __init__(self, name: str, root: Path, explain: Callable[[BaseException], str], beside: bool) -> None:
        self._made_of = name, root, explain, beside
        self._name, self._root, self._explain = name, root, explain
        self._host = Host(LastWorkload(), Console(stderr=True, force_terminal=False if beside else None))

    def __reduce__(self) -> tuple[Any, ...]:
        return Lane, self._made_of

    def run(self, study: Study, point: str) -> Ended:
        """Run a study; `point` names it in messages."""
        try:
            run_study(study, self._name, self._root, show=False, host=self._host)
        except (ArmsFailedError, BarMissedError) as error:
            return Ended(True, f"{point}: {error}")  # the other arms are there, or all
        except USER_ERRORS as mistake:
            words = f"{point}: {self._explain(mistake)}"
            say(self._host.console, f"failed: {words}")
            return Ended(False, words)
        return Ended(True)

    def run_here(self, study: Study, point: str) -> Ended:
        """Run a study whose arms take turns in this process."""
        study.executor, study.workers = ExecutorSettings("here"), None
        return self.run(study, point)


class Points:
    """Points that are on their way; each starts as soon as a lane is free."""

    def __init__(self, lanes: Executor[Lane]) -> None:
        self._lanes, self._running = lanes, dict[str, Future[Ended]]()

    def start(self, study: Study, point: str) -> None:
        """Let a point run; `point` names it."""
        self._running[point] = self._lanes.submit(Lane.run_here, study, point)

    def ends(self) -> dict[str, Ended]:
        """How each has ended, by name, once all have."""
        return {point: self._end(point, future) for point, future in self._running.items()}

    def _end(self, point: str, future: Future[Ended]) -> Ended:
        try:
            return future.result()
        except self._lanes.lost:
            return Ended(False, f"{point}: its process {KILLED}")


class PointsInTurn:
    """Points that run in this process, each when it is started, with the executor of its study."""

    def __init__(self, lane: Lane) -> None:
        self._lane, self._ended = lane, dict[str, Ended]()

    def start(self, study: Study, point: str) -> None:
        """Run a point; `point` names it."""
        self._ended[point] = self._lane.run(study, point)

    def ends(self) -> dict[str, Ended]:
        """How each has ended, by name."""
        return self._ended


@contextmanager
def points_of(
    study: Study, count: int, name: str, root: Path, explain: Callable[[BaseException], str]
) -> Iterator[Points | PointsInTurn]:
    """What runs `count` points of a study: side by side where the arms of one would leave cores idle."""
    lanes = _lanes(study, count)
    if lanes == 1:
        yield PointsInTurn(Lane(name, root, explain, beside=False))
        return
    with executor(ExecutorSettings(), Lane(name, root, explain, beside=True), lanes) as made:
        yield Points(made)


def _lanes(study: Study, count: int) -> int:
    """Points at once: as many as leave each arm a core."""
    arms = max(1, len(study.chosen()))
    return 1 if study.executor.kind == "dask" else max(1, worker_count(study, count * arms) // arms)

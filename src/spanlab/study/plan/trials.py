"""Trials of points: runs on the study's executor, each appended to a file as soon as it finishes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
from rich.console import Console
from rich.progress import track

from spanlab.settings import Study
from spanlab.study.output.arm_files import replace_file
from spanlab.study.plan.outcome import Outcome
from spanlab.study.plan.point import Point, RunResult, serve
from spanlab.study.progress import print_line

if TYPE_CHECKING:
    from spanlab.study.execution.arms import Arms


class Trials:
    """Runs of points under common random numbers: the same seeds, or the same shakes, at every point.

    `path`  file of finished runs, one line each, which a resumed plan reads; `sort` puts the lines into order
    """

    def __init__(self, study: Study, arms: Arms, path: Path, console: Console) -> None:
        self._study, self._arms, self._path, self._console = study, arms, path, console
        self._results = dict(_read_results(path))
        self._order: dict[tuple[str, int], None] = {}  # cells in the order in which the plan asked for them

    def outcomes(self, points: Sequence[Point], labels: Sequence[str], every: bool = False) -> list[Outcome]:
        """Return the outcomes of points, run in parallel; `labels` name them in the progress.

        A point with a clear outcome after one run is run once, unless `every` run is requested.
        """
        self._run([(point, self._replications(point)[0]) for point in points])
        unclear = [point for point in points if every or not self._outcome(point, 1).is_clear]
        self._run([(point, number) for point in unclear for number in self._replications(point)[1:]])
        outcomes = [self._outcome(point, len(self._replications(point)) if point in unclear else 1) for point in points]
        for name, outcome in zip(labels, outcomes, strict=True):
            print_line(self._console, f"{name}: {outcome.line()}")
        return outcomes

    def _replications(self, point: Point) -> Sequence[int]:
        """Return seeds of drawn arrivals, or numbers of shakes of recorded ones; one where no request waits."""
        if self._study.draws_arrivals():
            return self._study.seeds
        return range(1 if point.load is None else self._study.plan.shakes)

    def _run(self, cells: Sequence[tuple[Point, int]]) -> None:
        """Run the cells that have no result yet."""
        self._order |= dict.fromkeys((point.key, number) for point, number in cells)
        missing = {(point.key, number): point for point, number in cells if (point.key, number) not in self._results}
        jobs = {self._arms.submit(serve, point, cell[1]): cell for cell, point in missing.items()}
        silent = not (jobs and self._console.is_terminal)
        for job in track(as_completed(jobs), "runs", len(jobs), console=self._console, transient=True, disable=silent):
            self._record_result(jobs[job], self._arms.result(job))

    def _record_result(self, cell: tuple[str, int], result: RunResult) -> None:
        self._results[cell] = result
        with self._path.open("ab") as file:
            file.write(_line(cell, result))

    def sort(self) -> None:
        """Order the lines as the plan asked for them, which no order of completion changes; others last."""
        cells = [*self._order, *sorted(self._results.keys() - self._order.keys())]
        replace_file(self._path, b"".join(_line(cell, self._results[cell]) for cell in cells))

    def _outcome(self, point: Point, runs: int) -> Outcome:
        results = [self._results[point.key, number] for number in self._replications(point)[:runs]]
        return Outcome(point, self._study.slo.targets, results, self._study.draws_arrivals())


def _line(cell: tuple[str, int], result: RunResult) -> bytes:
    return orjson.dumps({"point": cell[0], "replication": cell[1]} | result, option=orjson.OPT_APPEND_NEWLINE)


def _read_results(path: Path) -> list[tuple[tuple[str, int], RunResult]]:
    """Return finished runs; an incomplete last line of a killed process is removed from the file."""
    path.touch()
    lines, newline, _ = path.read_bytes().rpartition(b"\n")
    os.truncate(path, len(lines + newline))
    rows = map(orjson.loads, lines.splitlines())
    return [((row.pop("point"), row.pop("replication")), row) for row in rows]

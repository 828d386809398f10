"""Points that are tried: their runs on the study's executor, each written down as soon as it is there."""

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
from spanlab.study.plan.outcome import Outcome
from spanlab.study.plan.point import Point, Served, serve
from spanlab.study.progress import say

if TYPE_CHECKING:
    from spanlab.study.execution.arms import Arms


class Trials:
    """Runs of points under common random numbers: the same seeds, or the same shakes, at every point.

    `path`  file of finished runs, one line each; a resumed plan reads what is there
    """

    def __init__(self, study: Study, arms: Arms, path: Path, console: Console) -> None:
        self._study, self._arms, self._path, self._console = study, arms, path, console
        self._known = dict(_read(path))

    def outcomes(self, points: Sequence[Point], words: Sequence[str], every: bool = False) -> list[Outcome]:
        """What the points come to, run side by side; `words` name them.

        Points of which the first run leaves no doubt are run once, unless `every` run is wanted.
        """
        self._run([(point, self._replications(point)[0]) for point in points])
        unclear = [point for point in points if every or not self._outcome(point, 1).is_clear]
        self._run([(point, number) for point in unclear for number in self._replications(point)[1:]])
        found = [self._outcome(point, len(self._replications(point)) if point in unclear else 1) for point in points]
        for name, outcome in zip(words, found, strict=True):
            say(self._console, f"{name}: {outcome.line()}")
        return found

    def _replications(self, point: Point) -> Sequence[int]:
        """Seeds where arrivals are drawn, numbers of shakes where they are recorded; far apart, a shake is nothing."""
        if self._study.draws_arrivals():
            return self._study.seeds
        return range(1 if point.load is None else self._study.plan.shakes)

    def _run(self, cells: Sequence[tuple[Point, int]]) -> None:
        """Run what is not known yet."""
        lacking = {(point.key, number): point for point, number in cells if (point.key, number) not in self._known}
        jobs = {self._arms.submit(serve, point, cell[1]): cell for cell, point in lacking.items()}
        silent = not (jobs and self._console.is_terminal)
        for job in track(as_completed(jobs), "runs", len(jobs), console=self._console, transient=True, disable=silent):
            self._note(jobs[job], self._arms.result(job))

    def _note(self, cell: tuple[str, int], served: Served) -> None:
        self._known[cell] = served
        with self._path.open("ab") as file:
            file.write(orjson.dumps({"point": cell[0], "replication": cell[1]} | served) + b"\n")

    def _outcome(self, point: Point, runs: int) -> Outcome:
        served = [self._known[point.key, number] for number in self._replications(point)[:runs]]
        return Outcome(point, self._study.slo.targets, served, self._study.draws_arrivals())


def _read(path: Path) -> list[tuple[tuple[str, int], Served]]:
    """Finished runs; a line that a killed process left unfinished is dropped, in the file too."""
    path.touch()
    whole = path.read_bytes().rpartition(b"\n")
    os.truncate(path, len(whole[0] + whole[1]))
    rows = map(orjson.loads, whole[0].splitlines())
    return [((row.pop("point"), row.pop("replication")), row) for row in rows]

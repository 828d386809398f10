"""Calibration in turns with what it is to predict, so that a machine that drifts does so for both."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.console import Console

from spanlab.bench.machine import progress
from spanlab.calibrate.measure import measure
from spanlab.calibrate.points import merged, read_points, write_rows
from spanlab.calibrate.profiles import profile_of
from spanlab.calibrate.run import as_profile, shapes_of
from spanlab.settings import DesignSettings, Study
from spanlab_sim.calibrated import Profile


class Rounds:
    """Every shape of a design once a round, before each repeat of the cells and after the last.

    Rounds are kept in `folder`, for a run that is interrupted. A study that names a profile measures none.
    """

    def __init__(self, study: Study, model: Any, design: DesignSettings, folder: Path, console: Console) -> None:
        self._study, self._model, self._design, self._folder, self._console = study, model, design, folder, console
        self._named = profile_of(study) if study.timing.profile is not None else None
        self._shapes, self._seed = shapes_of(study, model, design), design.seed

    def measure(self, number: int) -> None:
        """One round, where it is not there yet."""
        path = self._path(number)
        if self._named is not None or path.exists():
            return
        with progress(self._console) as bars:
            task = bars.add_task(f"calibrating, round {number}", total=len(self._shapes))
            points = measure(self._study, self._model, self._shapes, self._seed, number, lambda: bars.advance(task))
        partial = path.with_suffix(".partial")
        write_rows((point.row() for point in points), partial)
        os.replace(partial, path)

    def profile(self, rounds: int) -> Profile:
        """Fitted to so many rounds, or the one that is named."""
        if self._named is not None:
            return self._named
        points = merged([read_points(self._path(at)) for at in range(rounds)])
        return as_profile(self._study, self._model, self._design, points)

    def _path(self, number: int) -> Path:
        return self._folder / "calibration" / f"round{number}.jsonl"

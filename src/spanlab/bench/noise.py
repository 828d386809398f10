"""Noise of the machine under a benchmark: A/A of the baseline's equal requests, and readings in between."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spanlab.bench.bed import Bed
from spanlab.settings import EngineSettings
from spanlab.study import watch
from spanlab.study.fixed_step import FixedStep
from spanlab.study.noise import Noise, successive

FILE = "readings.jsonl"


class Watch:
    """Takes readings over one loaded model, into the folder of a run."""

    def __init__(self, bed: Bed, engine: EngineSettings, folder: Path) -> None:
        self._fixed = FixedStep(bed.spec, engine, bed.model)
        self._path = folder / f"{bed.name.replace('/', '_')}.{FILE}"

    def take(self) -> None:
        """Append one reading."""
        watch.take(self._path, self._fixed.measure)


def of_run(repeats: Iterable[list[float]], folder: Path) -> Noise:
    """The noise of a run. `repeats` are seconds of the baseline's equal requests in a row, by cell.

    Of several models each has a fixed step of its own, and the one that drifted most counts.
    """
    ratios = [ratio for seconds in repeats for ratio in successive(seconds)]
    by_model = [watch.readings(path) for path in sorted(folder.glob(f"*.{FILE}"))] or [[]]
    found = [Noise.of(ratios, readings, watch.cores()) for readings in by_model]
    return max(found, key=lambda noise: (len(noise.reasons()), noise.drift or 0.0))


def withheld(entries: Iterable[dict[str, Any]], keys: tuple[str, ...]) -> None:
    """Take conclusions that a noisy machine does not allow out of a summary's entries."""
    for entry in entries:
        entry.update(dict.fromkeys(keys))

"""Runs of the same arm on the same arrivals (A/A), and what they say of the machine's noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from spanlab.report.data import StudyData
from spanlab.settings import Study
from spanlab.study.machine import watch
from spanlab.study.machine.noise import Noise, ratios, successive
from spanlab.study.numbers import summary as sums
from spanlab.study.output.arm_files import ArmFiles


def repeat_files(folder: Path, arm: str) -> ArmFiles:
    """Where the repeated baseline is kept, apart from the arms' records; a resumed study may repeat another arm."""
    return _apart(folder, folder / "repeat" / arm)


def floor_files(folder: Path, arm: str) -> ArmFiles:
    """Where the baseline in other chunks is kept, by which the noise of its numerics is seen."""
    return _apart(folder, folder / "floor" / arm)


def _apart(folder: Path, own: Path) -> ArmFiles:
    logs = own / "steps", readings_of(folder), folder / "steps"
    return ArmFiles(own / "records.jsonl", own / "runs.jsonl", *logs)


def readings_of(folder: Path) -> Path:
    """The readings of a study, in the order of its runs."""
    return folder / "readings.jsonl"


def noise_of(study: Study, baseline: ArmFiles, again: ArmFiles | None, readings: Path) -> Noise:
    """The noise of a finished study: the baseline beside its repeat by seed, or its repeats by load; every reading."""
    found = _repeats(study, baseline) if again is None else _again(study, baseline, again)
    return Noise.of(found, watch.readings(readings), watch.cores())


def _again(study: Study, baseline: ArmFiles, again: ArmFiles) -> list[float]:
    return ratios(mean_ttfts(study, baseline), mean_ttfts(study, again))


def _repeats(study: Study, baseline: ArmFiles) -> list[float]:
    """At each load the A/A ratios of each repeat to the one before it."""
    delays: dict[float | None, dict[int, list[float]]] = {}
    for cell, columns in baseline.columns().items():
        delays.setdefault(cell.rate_rps, {}).setdefault(cell.repeat, []).append(_mean_ttft(columns))
    loads = [[float(np.mean(own[repeat])) for repeat in sorted(own)] for own in delays.values()]
    return [ratio for own in loads for ratio in successive(own)]


def mean_ttfts(study: Study, files: ArmFiles) -> list[float]:
    """Mean TTFT of each finished seed at the study's own load, seconds; in the order of `study.seeds`."""
    rate = study.arrivals.rate_rps
    own = {cell.seed: columns for cell, columns in files.columns().items() if cell.rate_rps == rate}
    return [_mean_ttft(own[seed]) for seed in study.seeds if seed in own]


def _mean_ttft(columns: sums.Columns) -> float:
    counted = sums.select(columns, columns["counted"].astype(bool))
    return float(np.mean(sums.delays(counted)["ttft_s"]))


def withdrawn(data: StudyData, noise: Noise) -> StudyData:
    """The study with its noise under the table; beyond a limit without speedups, and a caveat that says why."""
    data = replace(data, notes=(*data.notes, noise.words))
    sentence = noise.sentence("speedups")
    if not sentence:
        return data
    for arm in data.arms:
        arm.summary["speedup"] = None
    return replace(data, caveats=(*data.caveats, sentence), footer=f"{data.footer} · {sentence}")

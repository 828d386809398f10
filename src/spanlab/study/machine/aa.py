"""A/A runs: the same arm on the same arrivals, as a measure of the machine's noise."""

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
    """Files of the repeated baseline, in a folder by arm, because a resumed study may repeat another arm."""
    return ArmFiles.alone(folder / "repeat" / arm, readings_of(folder), folder / "steps")


def floor_files(folder: Path, arm: str) -> ArmFiles:
    """Files of the baseline with other prefill chunks, which measures its numerical noise."""
    return ArmFiles.alone(folder / "floor" / arm, readings_of(folder), folder / "steps")


def readings_of(folder: Path) -> Path:
    """File of a study's machine readings, in the order of its runs."""
    return folder / "readings.jsonl"


def noise_of(study: Study, baseline: ArmFiles, repeat: ArmFiles | None, readings: Path) -> Noise:
    """Noise of a finished study, from A/A ratios by seed (or between repeats at each load) and all readings."""
    aa_ratios = _successive_ratios(study, baseline) if repeat is None else _repeat_ratios(study, baseline, repeat)
    return Noise.of(aa_ratios, watch.read_readings(readings), watch.cores(), study.engine.alternate)


def _repeat_ratios(study: Study, baseline: ArmFiles, repeat: ArmFiles) -> list[float]:
    return ratios(mean_ttfts(study, baseline), mean_ttfts(study, repeat))


def _successive_ratios(study: Study, baseline: ArmFiles) -> list[float]:
    """A/A ratios of each repeat to the previous one, at each load."""
    ttfts: dict[float | None, dict[int, list[float]]] = {}
    for cell, columns in baseline.columns().items():
        ttfts.setdefault(cell.rate_rps, {}).setdefault(cell.repeat, []).append(_mean_ttft(columns))
    loads = [[float(np.mean(repeats[repeat])) for repeat in sorted(repeats)] for repeats in ttfts.values()]
    return [ratio for repeats in loads for ratio in successive(repeats)]


def mean_ttfts(study: Study, files: ArmFiles) -> list[float]:
    """Mean TTFT in seconds of each finished seed at the study's load, in the order of `study.seeds`."""
    rate = study.arrivals.rate_rps
    by_seed = {cell.seed: columns for cell, columns in files.columns().items() if cell.rate_rps == rate}
    return [_mean_ttft(by_seed[seed]) for seed in study.seeds if seed in by_seed]


def _mean_ttft(columns: sums.Columns) -> float:
    counted = sums.select(columns, columns["counted"].astype(bool))
    return float(np.mean(sums.delays(counted)["ttft_s"]))


def withdraw_speedups(data: StudyData, noise: Noise) -> StudyData:
    """Add the noise as a note; above a limit, also remove the speedups and add a caveat with the reason."""
    data = replace(data, notes=(*data.notes, noise.description))
    sentence = noise.sentence("speedups")
    if not sentence:
        return data
    for arm in data.arms:
        arm.summary["speedup"] = None
    return replace(data, caveats=(*data.caveats, sentence), footer=f"{data.footer} · {sentence}")

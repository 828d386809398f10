"""The repeated baseline of an engine study (A/A), and what a study says of its machine's noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from spanlab.report.data import StudyData
from spanlab.settings import Study
from spanlab.study import summary as sums
from spanlab.study import watch
from spanlab.study.arm_files import ArmFiles
from spanlab.study.noise import Noise, ratios


def repeat_files(folder: Path, arm: str) -> ArmFiles:
    """Where the repeated baseline is kept, apart from the arms' records; a resumed study may repeat another arm."""
    own = folder / "repeat" / arm
    return ArmFiles(own / "records.jsonl", own / "runs.jsonl", own / "steps", readings_of(folder))


def readings_of(folder: Path) -> Path:
    """The readings of a study, in the order of its runs."""
    return folder / "readings.jsonl"


def noise_of(study: Study, baseline: ArmFiles, again: ArmFiles) -> Noise:
    """The noise of a finished study: the baseline beside its repeat by seed, and every reading."""
    pairs = mean_ttfts(study, baseline), mean_ttfts(study, again)
    return Noise.of(ratios(*pairs), watch.readings(baseline.readings), watch.cores())


def mean_ttfts(study: Study, files: ArmFiles) -> list[float]:
    """Mean TTFT of each finished seed at the study's own load, seconds; in the order of `study.seeds`."""
    if not files.records.exists() or not files.records.stat().st_size:
        return []
    columns = sums.read_records(files.records)
    columns = sums.select(columns, sums.at_rate(columns, study.arrivals.rate_rps) & columns["counted"].astype(bool))
    delay, seeds = sums.delays(columns)["ttft_s"], columns["seed"]
    return [float(np.mean(delay[seeds == seed])) for seed in study.seeds if (seeds == seed).any()]


def told(data: StudyData, summary: dict[str, Any], noise: Noise) -> StudyData:
    """The study with its noise in the summary; beyond a limit without speedups, and a caveat that says why."""
    summary["machine_noise"] = noise.summary()
    data = replace(data, notes=(*data.notes, noise.words))
    sentence = noise.sentence("speedups")
    if not sentence:
        return data
    for arm in data.arms:
        arm.summary["speedup"] = None
    data = replace(data, caveats=(*data.caveats, sentence), footer=f"{data.footer} · {sentence}")
    summary["caveats"] = list(data.caveats)
    return data

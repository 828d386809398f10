"""Calibration from settings to a profile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from spanlab import build
from spanlab.bench.machine import device_name, engine_facts, progress
from spanlab.calibrate import figures, profiles
from spanlab.calibrate.fit import fit, hull, left_out
from spanlab.calibrate.measure import measure, serve_shape
from spanlab.calibrate.points import Point, merged, write_rows
from spanlab.calibrate.shapes import Shape, design
from spanlab.calibrate.table import as_table, footer, left_out_line
from spanlab.settings import Calibrate, DesignSettings
from spanlab.study import provenance
from spanlab.study.config import as_yaml
from spanlab.study.folder import RunFolder
from spanlab.study.progress import say
from spanlab.study.warm_up import warm_up
from spanlab.terminal import printed
from spanlab.tracking import tracked
from spanlab_sim.calibrated import Profile


def calibrate(study: Any, model: Any, settings: DesignSettings, done: Callable[[], None] = lambda: None) -> Profile:
    """The profile of a loaded model, measured on the arms that a study chose, and under its batch rules.

    `done` is called after each of `settings.shapes` · `settings.repeats` runs.
    """
    return as_profile(study, model, settings, _measured(study, model, settings, done))


def shapes_of(study: Any, model: Any, settings: DesignSettings) -> list[Shape]:
    """The design for the arms that a study chose, under its batch rules."""
    names, rules = study.chosen(), build.build_rules(study)
    anywhere = {name for name in names if study.arms[name].spans is not None}
    return design(settings, names, rules, model.vocab_size, anywhere)


def as_profile(study: Any, model: Any, settings: DesignSettings, points: Sequence[Point]) -> Profile:
    """Prices fitted to points of a design, how well they predict, and where and when that was."""
    errors = left_out(points)
    magnitude = np.abs(errors)
    return Profile(
        model=study.model.name,
        machine=provenance.machine(),
        device=device_name(model.device),
        threads=torch.get_num_threads(),
        dtype=str(model.dtype).removeprefix("torch."),
        versions=engine_facts(),
        date=datetime.now(UTC).date().isoformat(),
        commit=provenance.commit(),
        coefficients=fit(points),
        hull=hull(points),
        left_out={
            "median": float(np.median(magnitude)),
            "p95": float(np.quantile(magnitude, 0.95)),
            "bias": float(errors.mean()),
        },
        shapes=len({point.place.shape for point in points}),
        steps=len(points),
        longest=settings.longest,
    )


def run_calibrate(settings: Calibrate, name: str, root: Path) -> Path:
    """Measure, fit, and leave a folder and the profile that the simulator finds; returns the folder."""
    started = time.perf_counter()
    console, config = Console(stderr=True), asdict(settings)
    run = settings.output.run or name
    with (
        RunFolder(root, "calibrate", run, settings.output.if_exists, as_yaml(config, ())) as folder,
        tracked(settings.tracking, run, name, config, folder.work) as tracker,
    ):
        model = build.build_model(settings)
        _warm_up(settings, model)
        with progress(console) as bars:
            task = bars.add_task(settings.model.name, total=settings.design.shapes * settings.design.repeats)
            points = _measured(settings, model, settings.design, lambda: bars.advance(task))
        errors, profile = left_out(points), as_profile(settings, model, settings.design, points)
        _write(profile, points, errors, folder.work)
        with printed(120) as shown:
            shown.print(Text(f"{footer(profile)}\n{left_out_line(profile)}"), as_table(profile), "")
        facts = provenance.run_facts(time.perf_counter() - started, provenance.PACKAGES_OF["engine"])
        tracker.summary(asdict(profile) | facts)
        if settings.output.figures:
            drawn = figures.write(profile, points, errors, folder.work / "figures")
            tracker.figures([path for path in drawn if path.suffix == ".png"])
        folder.finish()
    say(console, str(folder.path))
    say(console, profiles.keep(profile, root))
    return folder.path


def _warm_up(settings: Calibrate, model: Any) -> None:
    shapes = shapes_of(settings, model, settings.design)
    warm_up(settings.chosen(), shapes[0].requests, serve_shape(settings, model, shapes[0].rules))


def _measured(study: Any, model: Any, settings: DesignSettings, done: Callable[[], None]) -> list[Point]:
    shapes = shapes_of(study, model, settings)
    return merged([measure(study, model, shapes, settings.seed, number, done) for number in range(settings.repeats)])


def _write(profile: Profile, points: Sequence[Point], errors: NDArray[np.float64], folder: Path) -> None:
    """The profile, and every step that it was fitted to with its error where its shape was left out."""
    profile.write(folder / "profile.json")
    told = zip(points, errors.tolist(), strict=True)
    write_rows((point.row() | {"left_out_error": error} for point, error in told), folder / "steps.jsonl")

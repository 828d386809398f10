"""The analysis `fit_profile`: fit the coefficients of a timing model to step times of designed shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from spanlab.analysis.points import Point, StepId
from spanlab.report.fidelity.profile import cross_validation_line, footer, profile_table
from spanlab.report.fidelity.residuals import draw as draw_residuals
from spanlab.report.fidelity.step_times import draw as draw_step_times
from spanlab.settings import Study
from spanlab.settings.analyses import ANALYSES
from spanlab.study.fidelity import profiles
from spanlab.study.fidelity.shapes import shape_numbers
from spanlab.study.findings import Findings, Finished
from spanlab.study.machine.device import EngineFacts
from spanlab.study.output import provenance
from spanlab.study.output.arm_files import ArmFiles, Cell
from spanlab.study.output.step_log import read_steps
from spanlab_sim.calibrated import Profile

FIGURES = {"predicted": draw_step_times, "residuals": draw_residuals}


@ANALYSES.register("fit_profile")
def fit_profile(finished: Finished) -> Findings:
    """Fit the profile, and store it for simulations unless the machine was noisy or an arm failed."""
    from spanlab.analysis.fit import cross_validation_errors  # loads scipy, half a second

    assert finished.facts is not None, "shapes run on the engine"
    points = points_of(finished.study, finished.files)
    errors, profile = cross_validation_errors(points), profile_from_points(finished.study, finished.facts, points)
    profile.write(finished.folder / "profile.json")
    _write(points, errors, finished.folder / "steps.jsonl")
    storage_note = (
        f"profile not kept, for it lacks arms: {', '.join(finished.failed)}"
        if finished.failed
        else profiles.store_profile(profile, finished.root)
    )
    noise = finished.noise_sentence("conclusions")
    quality = f"{cross_validation_line(profile)} · {footer(profile)}"
    return Findings(
        summary={"fit_profile": {"profile": asdict(profile), "kept": storage_note}},
        tables=(profile_table(profile, (storage_note, *finished.failed.values(), *filter(None, [noise]))),),
        figures={name: partial(drawing, points, errors, quality) for name, drawing in FIGURES.items()},
        caveats=tuple(filter(None, [noise])),
    )


def points_of(study: Study, files: Mapping[str, ArmFiles]) -> list[Point]:
    """Return every step of a calibration's shapes, sorted by shape and step, with its time in each repeat."""
    shapes = [(arm, number) for arm in files for number in shape_numbers(study, arm)]
    points = [point for arm, number in shapes for point in _read_points(study, arm, files[arm], number)]
    return sorted(points, key=lambda point: point.step_id)


def _read_points(study: Study, arm: str, files: ArmFiles, number: int) -> list[Point]:
    logs = [read_steps(files.log(arm, Cell(number, None, repeat))) for repeat in range(study.design.repeats)]
    points = []
    for index, repeats in enumerate(zip(*logs, strict=True)):
        assert all(step.features == repeats[0].features for step in repeats), (
            "repeats of a shape compose the same steps"
        )
        times = tuple(step.took_ns for step in repeats)
        points.append(Point(StepId(number, index), arm, repeats[0].features, times))
    return points


def profile_from_points(study: Study, facts: EngineFacts, points: Sequence[Point]) -> Profile:
    """Fit coefficients to the points of a calibration; the profile includes errors, machine, date and commit."""
    from spanlab.analysis.fit import cross_validation_errors, fit, hull

    errors = cross_validation_errors(points)
    magnitude = np.abs(errors)
    assert study.design.longest is not None, "a calibration has limits"
    return Profile(
        model=study.model.name,
        machine=provenance.machine(),
        device="cpu" if facts.kind == "cpu" else facts.device,
        threads=facts.threads,
        dtype=facts.dtype,
        versions={
            name: version for name, version in facts.versions.items() if name in provenance.PACKAGES_OF["engine"]
        },
        date=datetime.now(UTC).date().isoformat(),
        commit=provenance.commit(),
        coefficients=fit(points),
        hull=hull(points),
        left_out={
            "median": float(np.median(magnitude)),
            "p95": float(np.quantile(magnitude, 0.95)),
            "bias": float(errors.mean()),
        },
        shapes=len({point.step_id.shape for point in points}),
        steps=len(points),
        longest=study.design.longest,
    )


def _write(points: Sequence[Point], errors: NDArray[np.float64], path: Path) -> None:
    """Write every fitted step with its cross-validation error."""
    pairs = zip(points, errors.tolist(), strict=True)
    rows = [point.row() | {"left_out_error": error} for point, error in pairs]
    path.write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))

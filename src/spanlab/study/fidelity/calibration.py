"""The calibrated profile with which a study measures the simulator's prediction error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
from rich.console import Console

from spanlab.core.request import Request
from spanlab.settings import Study
from spanlab.study.execution.cells import cells
from spanlab.study.execution.turns import CALIBRATION_PREFIX, Row
from spanlab.study.fidelity.profiles import local_profile, profile_of
from spanlab.study.fidelity.shapes import calibration_of
from spanlab.study.output.arm_files import ArmFiles
from spanlab.study.progress import print_line
from spanlab_sim.calibrated import Profile, read_profile


def find_profile(study: Study, requests: tuple[Request, ...]) -> Profile | None:
    """Return the profile that the study names, or a stored one that covers the longest prompt; else None."""
    if study.timing.profile is not None:
        return profile_of(study)
    profile = local_profile(study)
    return profile if profile is not None and profile.longest >= _longest(study, requests) else None


def interleaved_calibration(study: Study, requests: tuple[Request, ...]) -> Study:
    """Return a calibration that is interleaved with a study's repeats: one round before each, one after the last."""
    calibration = calibration_of(study, requests)
    return replace(calibration, design=replace(calibration.design, repeats=study.repeats + 1))


def rows(calibration: Study, folder: Path) -> list[Row]:
    """Rows of a calibration within another study; the files are in `folder`."""
    files = {arm: ArmFiles.of_arm(folder, arm) for arm in calibration.chosen()}
    calibration_rows = [
        Row(CALIBRATION_PREFIX + arm, arm, files[arm], tuple(cells(calibration, arm)), calibrates=True) for arm in files
    ]
    return [row for row in calibration_rows if row.cells]


def measure_profile(study: Study, requests: tuple[Request, ...], name: str, root: Path, console: Console) -> Profile:
    """Run a separate calibration and return its profile; it is stored for later studies if the machine was calm."""
    from spanlab.study.run import run_study  # circular import: the study runs another study first

    print_line(console, f"{_describe_missing_profile(study, requests)}: measuring one first, for the simulator")
    calibration = calibration_of(study, requests)
    output = replace(study.output, run=f"{name}_calibration", if_exists="replace")
    calibration = replace(calibration, tracking=replace(study.tracking, kind="none"), output=output)
    folder = run_study(calibration, "calibrate", root, show=False)
    print_line(console, orjson.loads((folder / "summary.json").read_bytes())["fit_profile"]["kept"])
    return read_profile(folder / "profile.json")


def _describe_missing_profile(study: Study, requests: tuple[Request, ...]) -> str:
    text, profile = f"no profile of {study.model.name} on this machine", local_profile(study)
    if profile is None:
        return text
    return f"{text} covers {_longest(study, requests):,} tokens (the stored one covers {profile.longest:,})"


def _longest(study: Study, requests: tuple[Request, ...]) -> int:
    return study.design.longest or max(request.num_tokens for request in requests)

"""The timing model by which a study says how well the simulator predicts it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
from rich.console import Console

from spanlab.core.request import Request
from spanlab.settings import Study
from spanlab.study.execution.cells import cells
from spanlab.study.execution.turns import CALIBRATION, Row
from spanlab.study.fidelity.profiles import local_profile, profile_of
from spanlab.study.fidelity.shapes import calibration_of
from spanlab.study.output.arm_files import ArmFiles
from spanlab.study.progress import say
from spanlab_sim.calibrated import Profile, read_profile


def known_profile(study: Study, requests: tuple[Request, ...]) -> Profile | None:
    """The profile that the study names, or one that a run left and that reaches the longest prompt; else None."""
    if study.timing.profile is not None:
        return profile_of(study)
    found = local_profile(study)
    return found if found is not None and found.longest >= _longest(study, requests) else None


def in_turns(study: Study, requests: tuple[Request, ...]) -> Study:
    """The calibration that takes turns with the repeats of a study: one round before each, one after the last."""
    made = calibration_of(study, requests)
    return replace(made, design=replace(made.design, repeats=study.repeats + 1))


def rows(calibration: Study, folder: Path) -> list[Row]:
    """The runs of a calibration within another study, kept in `folder`."""
    found = []
    for arm in calibration.chosen():
        files = ArmFiles(folder / "records" / f"{arm}.jsonl", folder / "runs" / f"{arm}.jsonl", folder / "steps", None)
        found.append(Row(CALIBRATION + arm, arm, files, tuple(cells(calibration, arm)), calibrates=True))
    return [row for row in found if row.cells]


def made_profile(study: Study, requests: tuple[Request, ...], name: str, root: Path, console: Console) -> Profile:
    """The profile of a calibration of its own, which the next study finds where the machine was calm."""
    from spanlab.study.run import run_study  # a study that a study needs first

    say(console, f"{_lacking(study, requests)}: one is measured first, for the simulator")
    made = calibration_of(study, requests)
    output = replace(study.output, run=f"{name}_calibration", if_exists="replace")
    made = replace(made, tracking=replace(study.tracking, kind="none"), output=output)
    folder = run_study(made, "calibrate", root, show=False)
    say(console, orjson.loads((folder / "summary.json").read_bytes())["fit_profile"]["kept"])
    return read_profile(folder / "profile.json")


def _lacking(study: Study, requests: tuple[Request, ...]) -> str:
    none, found = f"no profile of {study.model.name} on this machine", local_profile(study)
    reach = "" if found is None else f" reaches {_longest(study, requests):,} tokens, only {found.longest:,}"
    return none + reach


def _longest(study: Study, requests: tuple[Request, ...]) -> int:
    return study.design.longest or max(request.num_tokens for request in requests)

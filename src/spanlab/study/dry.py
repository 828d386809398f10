"""Dry run: all checks before a run that need no device and no package of the engine; nothing is written."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from spanlab.registry import entry_of
from spanlab.settings import Study
from spanlab.study.folder import check_names
from spanlab.study.jobs import run_cells
from spanlab.study.machine import installed
from spanlab.study.prepare import LoadFunction, load_workload
from spanlab.study.run import folder_names
from spanlab.study.sweep import Compose, LastWorkload, named_point, points_of_sweep, sweep_names
from spanlab.tracking import check_login


def check_entry(settings: object, entry: str, run: str, root: Path) -> str:
    """Check an entry that is no study, and say so in one line; `root` is the folder of outputs."""
    check = entry_of(settings).check
    if check is not None:
        check(settings, root)
    return f"{entry}: the settings are valid"


def describe_run(study: Study, name: str, root: Path, compose: Compose) -> str:
    """Describe the study's arms, runs and requests, one line each; ValueError where a check fails.

    `compose`  returns the study with further overrides, for the points of a sweep
    """
    if study.tracking.kind == "wandb" and installed("wandb"):
        check_login(study.tracking)
    load, quiet = LastWorkload(), Console(quiet=True)
    if study.sweep:
        check_names(*sweep_names(study, root))
        sizes = []
        for point, swept in points_of_sweep(study, compose):
            with named_point(study, point):
                sizes.append(_requests(swept, name, root, quiet, load))
    else:
        sizes = [_requests(study, name, root, Console(stderr=True), load)]
    arms, runs = study.chosen(), sum(len(run_cells(study, arm)) for arm in study.chosen())
    return "\n".join(
        [
            f"entry     {name}, backend={study.backend}",
            f"arms      {len(arms)}: {', '.join(arms)}",
            f"runs      {runs}: arms x seeds, plus the load sweep",
            f"requests  {sizes[0]} per run, {runs * sizes[0]} in total",
            *(f"sweep     {point}" for point in study.sweep),
        ]
    )


def _requests(study: Study, name: str, root: Path, console: Console, load: LoadFunction) -> int:
    """Check a study with its workload and the names of its run, and return the requests of a run."""
    workload = load_workload(study, name, root, console, load)
    check_names(*folder_names(study, name, root, workload))
    return study.workload.popularity.requests or workload.size

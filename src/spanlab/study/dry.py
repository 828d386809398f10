"""Dry run of a study: all checks that need no device and no package of the engine."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from spanlab.settings import Study
from spanlab.study.execution.cells import cells
from spanlab.study.prepare import load_workload


def describe_run(study: Study, name: str, root: Path) -> str:
    """Describe the study's arms, runs and requests, one line each; ValueError where a check fails."""
    workload = load_workload(study, name, root, Console(stderr=True))
    arms, runs = study.chosen(), sum(len(cells(study, arm)) for arm in study.chosen())
    requests = study.workload.popularity.requests or workload.size
    return "\n".join(
        [
            f"entry     {name}, backend={study.backend}",
            f"arms      {len(arms)}: {', '.join(arms)}",
            f"runs      {runs}: arms x seeds, plus the load sweep",
            f"requests  {requests} per run, {runs * requests} in total",
            *(f"sweep     {point}" for point in study.sweep),
        ]
    )

"""What a study would run: checked as far as this takes no device and no package of the engine."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from spanlab.settings import Study
from spanlab.study.execution.cells import cells
from spanlab.study.prepare import prepared


def describe_run(study: Study, name: str, root: Path) -> str:
    """The study's arms, runs and requests in words, one line each; ValueError where a check refuses it."""
    workload = prepared(study, name, root, Console(stderr=True))
    arms, runs = study.chosen(), sum(len(cells(study, arm)) for arm in study.chosen())
    requests = study.workload.popularity.requests or workload.size
    return "\n".join(
        [
            f"entry     {name}, backend={study.backend}",
            f"arms      {len(arms)}: {', '.join(arms)}",
            f"runs      {runs}: arms x seeds, and further loads",
            f"requests  {requests} in each run, {runs * requests} in all",
            *(f"sweep     {point}" for point in study.sweep),
        ]
    )

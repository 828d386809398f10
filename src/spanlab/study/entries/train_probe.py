"""The entry `train_probe`: train the probe, keep its weights and the course of its training."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from spanlab.analysis.recall import TrainingPoint
from spanlab.report.probe.recall_figures import draw_training
from spanlab.report.probe.recall_tables import training_table
from spanlab.settings.probe import TrainProbe
from spanlab.study.entries.probe_run import FOLDER, Findings, write_findings
from spanlab.study.output.config import settings_yaml
from spanlab.study.output.folder import RunFolder
from spanlab.study.progress import say

WEIGHTS = "weights"


def run_train_probe(settings: TrainProbe, run: str, root: Path) -> Path:
    """Train and leave a folder; returns the folder."""
    import torch

    from spanlab.probe.train import train
    from spanlab.probe.weights import to_train

    started = time.perf_counter()
    torch.set_num_threads(settings.threads)
    config = settings_yaml(asdict(settings))
    model = to_train(settings)
    with RunFolder(root, FOLDER, run, settings.output.if_exists, config) as folder:
        points = list(_told(train(model, settings)))
        model.save_pretrained(folder.work / WEIGHTS)
        found = Findings(
            data=f"{settings.steps} steps of {settings.batch_tokens:,} tokens, up to {settings.documents} documents",
            model=f"probe of {model.num_parameters():,} parameters",
            seeds=[settings.seed],
            threads=settings.threads,
            tables=[training_table(points)],
            printed=1,
            figures={"training": partial(draw_training, points)} if settings.output.figures else {},
        )
        write_findings(folder, "Training of the probe", config, found, started)
    return folder.path


def _told(points: Iterable[TrainingPoint]) -> Iterator[TrainingPoint]:
    """The points, each said as it comes."""
    console = Console(stderr=True)
    for point in points:
        read = f"{point.read}: loss {point.loss:.3f}, accuracy {point.accuracy:.1%}"
        say(console, f"step {point.step}, {read}")
        yield point

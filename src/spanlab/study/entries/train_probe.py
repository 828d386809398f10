"""The entry `train_probe`: train the probe, and store its weights and training curve."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from rich.console import Console

from spanlab.probe.recall_figures import draw_training
from spanlab.probe.recall_scores import TrainingPoint
from spanlab.probe.recall_tables import training_table
from spanlab.settings.probe import TrainProbe
from spanlab.study.entries.probe_run import FOLDER, Findings, write_findings
from spanlab.study.folder import entry_folder, print_line

WEIGHTS = "weights"


def run_train_probe(settings: TrainProbe, run: str, root: Path) -> Path:
    """Train the probe, write a run folder, and return the folder."""
    import torch

    from spanlab.probe.train import train
    from spanlab.probe.weights import initial_model

    started = time.perf_counter()
    torch.set_num_threads(settings.threads)
    model = initial_model(settings)
    with entry_folder(settings, FOLDER, run, root) as folder:
        points = list(_print_points(train(model, settings)))
        model.save_pretrained(folder.work / WEIGHTS)
        findings = Findings(
            data=f"{settings.steps} steps of {settings.batch_tokens:,} tokens, up to {settings.documents} documents",
            model=f"probe of {model.num_parameters():,} parameters",
            tables=[training_table(points)],
            printed=1,
            figures={"training": partial(draw_training, points)},
        )
        write_findings(folder, "Training of the probe", settings, findings, started)
    return folder.path


def _print_points(points: Iterable[TrainingPoint]) -> Iterator[TrainingPoint]:
    """Yield the points, and print each one."""
    console = Console(stderr=True)
    for point in points:
        print_line(console, f"step {point.step}, {point.read}: loss {point.loss:.3f}, accuracy {point.accuracy:.1%}")
        yield point

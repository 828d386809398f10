"""Figures of the benchmark, in the look of all reports; one set for every model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from spanlab.checkpoint_bench.figures import capture, held, prefill, speedup
from spanlab.report.data import StudyData
from spanlab.report.write import write_figure

Summary = dict[str, Any]

FIGURES: dict[str, Callable[[StudyData, Summary], Figure | None]] = {
    "prefill": prefill.draw,
    "capture": capture.draw,
    "bytes": held.draw,
    "speedup": speedup.draw,
}

_BY_MODEL = ("captures", "again", "noise", "goal", "curves")


def write(summary: Summary, title: str, footer: str, folder: Path) -> list[Path]:
    """Draw everything into `folder` as PNG and PDF, `<figure>_<model>`; returns the files written."""
    written = []
    for model in dict.fromkeys(entry["model"] for entry in summary["noise"]):
        own = summary | {key: [entry for entry in summary[key] if entry["model"] == model] for key in _BY_MODEL}
        study = StudyData(f"{model}: {title}", footer, [], [], "")
        for name, draw in FIGURES.items():
            if name == "speedup" and any(entry["speedup"] is None for entry in own["again"]):
                continue  # withheld, for the machine was noisy
            written += write_figure(partial(draw, study, own), folder / f"{name}_{model.replace('/', '_')}")
    return written

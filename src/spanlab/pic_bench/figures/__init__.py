"""Figures of the benchmark, in the look of all reports; one set for every model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from spanlab.pic_bench.figures import parts, speedup, ttft
from spanlab.report.data import StudyData
from spanlab.report.write import write_figure

Entries = list[dict[str, Any]]

FIGURES: dict[str, Callable[[StudyData, Entries], Figure]] = {
    "ttft": ttft.draw,
    "speedup": speedup.draw,
    "parts": parts.draw,
}


def write(entries: Entries, title: str, footer: str, folder: Path) -> list[Path]:
    """Draw everything into `folder` as PNG and PDF, `<figure>_<model>`; returns the files written."""
    written = []
    for model in dict.fromkeys(entry["model"] for entry in entries):
        own = [entry for entry in entries if entry["model"] == model]
        study = StudyData(f"{model}: {title}", footer, [], [], "")
        for name, draw in FIGURES.items():
            if name == "speedup" and any(entry["speedup"] is None for entry in own):
                continue  # withheld, for the machine was noisy
            stem = folder / f"{name}_{model.replace('/', '_')}"
            written += write_figure(partial(draw, study, own), stem)
    return written

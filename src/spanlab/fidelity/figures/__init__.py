"""Figures of engine beside simulator, in the look of all reports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from spanlab.fidelity.compare import Compared
from spanlab.fidelity.figures import error_by_load, predicted_measured, ranking
from spanlab.report.write import write_figure

Draw = Callable[[list[Compared], str], Figure | None]

FIGURES: dict[str, Draw] = {
    "predicted_measured": predicted_measured.draw,
    "error_by_load": error_by_load.draw,
    "ranking": ranking.draw,
}


def write(found: list[Compared], footer: str, folder: Path) -> list[Path]:
    """Draw everything into `folder` as PNG and PDF; returns the files written."""
    return [
        path for name, draw in FIGURES.items() for path in write_figure(partial(draw, found, footer), folder / name)
    ]


def write_one(found: list[Compared], footer: str, folder: Path) -> list[Path]:
    """What a study at its own rate has to show: each request, predicted and measured."""
    return write_figure(partial(predicted_measured.draw, found, footer), folder / "predicted_measured")

"""Figures of a calibration, in the look of all reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from spanlab.calibrate.figures import predicted, residuals
from spanlab.calibrate.points import Point
from spanlab.report.write import write_figure
from spanlab_sim.calibrated import Profile

FIGURES: dict[str, Callable[[Profile, Sequence[Point], NDArray[np.float64]], Figure]] = {
    "predicted": predicted.draw,
    "residuals": residuals.draw,
}


def write(profile: Profile, points: Sequence[Point], errors: NDArray[np.float64], folder: Path) -> list[Path]:
    """Draw everything into `folder` as PNG and PDF; returns the files written."""
    drawn = (write_figure(partial(draw, profile, points, errors), folder / name) for name, draw in FIGURES.items())
    return [path for paths in drawn for path in paths]

"""Offered load against the time to first token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanlab.report.data import StudyData
from spanlab.report.figures import FIGURES
from spanlab.report.figures.load_curves import draw_load_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@FIGURES.register("ttft_load")
def draw(study: StudyData) -> Figure | None:
    """Mean and p99 of the time to first token by offered load, utilisation below."""
    return draw_load_curves(study, lambda point: point.ttft_s, "Time to first token by offered load", "TTFT")

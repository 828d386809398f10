"""Offered load against queueing delay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanlab.report.data import StudyData
from spanlab.report.figures import FIGURES
from spanlab.report.figures.load_curves import draw_load_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@FIGURES.register("queueing_load")
def draw(study: StudyData) -> Figure | None:
    """Mean and p99 of the queueing delay by offered load, utilisation below."""
    return draw_load_curves(study, lambda point: point.queue_s, "Queueing delay by offered load", "queueing delay")

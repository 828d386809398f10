"""The figures of a study by file name; nothing is imported before it is drawn."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from spanlab.report.data import StudyData

FIGURES: dict[str, str] = {
    name: f"{__name__}.{name}:draw"
    for name in (
        "pareto_tokens",
        "pareto_ttft",
        "length_ttft",
        "common_prefix",
        "checkpoint_positions",
        "loss_by_cause",
        "cache_content",
        "queueing_load",
        "ttft_load",
        "ttft_distribution",
    )
}


class Draw(Protocol):
    """Draws one figure, or returns None where the study has nothing to show."""

    def __call__(self, study: StudyData) -> Figure | None: ...


def load(name: str) -> Draw:
    """The draw function of a figure; an unknown name lists the valid ones."""
    if name not in FIGURES:
        raise ValueError(f"unknown figure {name!r}, expected one of {', '.join(FIGURES)}")
    module, function = FIGURES[name].split(":")
    draw: Draw = getattr(import_module(module), function)
    return draw

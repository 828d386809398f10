"""The figures of a study by file name; the module of a figure is imported when it is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanlab.registry import Registry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Draws one figure of a study's data, or returns None where the study has nothing to show.
FIGURES: Registry[Figure | None] = Registry("figure", given=("study",))

FIGURES.later("pareto_tokens", "spanlab.report.figures.pareto_tokens")
FIGURES.later("pareto_ttft", "spanlab.report.figures.pareto_ttft")
FIGURES.later("length_ttft", "spanlab.report.figures.length_ttft")
FIGURES.later("common_prefix", "spanlab.report.figures.common_prefix")
FIGURES.later("checkpoint_positions", "spanlab.report.figures.checkpoint_positions")
FIGURES.later("loss_by_cause", "spanlab.report.figures.loss_by_cause")
FIGURES.later("cache_content", "spanlab.report.figures.cache_content")
FIGURES.later("queueing_load", "spanlab.report.figures.queueing_load")
FIGURES.later("ttft_load", "spanlab.report.figures.ttft_load")
FIGURES.later("ttft_distribution", "spanlab.report.figures.ttft_distribution")

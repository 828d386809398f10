"""The figures of a study by file name; the module of a figure is imported when it is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanlab.registry import Registry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Draws one figure of a study's data, or returns None where the study has nothing to show.
FIGURES: Registry[Figure | None] = Registry("figure", given=("study",))

for _name in (
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
):
    FIGURES.later(_name, f"{__name__}.{_name}")

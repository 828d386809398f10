"""The analysis `families`: the best arm of each family of methods, and which family leads where."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from spanlab.analysis.families import MeasuredArm, compare_families, plain, without_ratios
from spanlab.report.analyses.families import families_of, families_table, winners_table
from spanlab.report.sweep.data import SweepPoint, by_axis
from spanlab.settings.analyses import ANALYSES, OF_POINTS
from spanlab.study.findings import Findings, Finished

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@ANALYSES.register("families")
def families_of_study(finished: Finished) -> Findings:
    """The families of one study, side by side; no speedups where the machine was noisy."""
    arms = [MeasuredArm(one.data.name, one.data.summary, one.ttft_sums) for one in finished.results]
    compared = compare_families(arms, finished.study.families)
    noisy = finished.noise is not None and finished.noise.reasons()
    found = plain(*(without_ratios(*compared) if noisy else compared))
    return Findings(summary={"families": found}, tables=(families_table(found),))


@OF_POINTS.register("families")
def families_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Which family leads at which point: one table and one figure for each axis of the sweep."""
    ran = [point for point in points if point.summary is not None]
    groups = {f"winners_{number}": group for number, group in enumerate(by_axis(ran).values(), 1)}
    return Findings(
        summary={"winners": [{"settings": dict(one.settings), **families_of(one)} for one in ran]},
        tables=tuple(winners_table(name, group) for name, group in groups.items()),
        figures={name: partial(_draw, group) for name, group in groups.items()},
    )


def _draw(points: Sequence[SweepPoint]) -> Figure:
    from spanlab.report.analyses.families_figure import (
        draw_winners,  # matplotlib: half a second that only drawing needs
    )

    return draw_winners(points)

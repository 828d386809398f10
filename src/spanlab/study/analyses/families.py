"""The analysis `families`: the best arm of each family of methods, and the family that leads at each point."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from spanlab.analysis.families import MeasuredArm, compare_families, plain, without_ratios
from spanlab.report.analyses.families import families_table, winners_table
from spanlab.report.sweep.data import SweepPoint, by_axis
from spanlab.settings.analyses import ANALYSES, OF_POINTS
from spanlab.study.findings import Findings, Finished

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@ANALYSES.register("families")
def families_of_study(finished: Finished) -> Findings:
    """Return the comparison of the families of one study; no speedups where the machine was noisy."""
    arms = [MeasuredArm(result.data.name, result.data.summary, result.ttft_sums) for result in finished.results]
    compared = compare_families(arms, finished.study.families)
    noisy = finished.noise is not None and finished.noise.reasons()
    entry = plain(*(without_ratios(*compared) if noisy else compared))
    return Findings(summary={"families": entry}, tables=(families_table(entry),))


@OF_POINTS.register("families")
def families_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return the family that leads at each point: one table and one figure per axis of the sweep."""
    ran = [point for point in points if point.summary is not None]
    groups = {f"winners_{number}": group for number, group in enumerate(by_axis(ran).values(), 1)}
    return Findings(
        summary={"winners": [{"settings": dict(point.settings), **point.findings("families")} for point in ran]},
        tables=tuple(winners_table(name, group) for name, group in groups.items()),
        figures={name: partial(_draw, group) for name, group in groups.items()},
    )


def _draw(points: Sequence[SweepPoint]) -> Figure:
    from spanlab.report.analyses.families_figure import (
        draw_winners,  # matplotlib: half a second that only drawing needs
    )

    return draw_winners(points)

"""The analysis `families`: the best arm of each family of methods, and the family that leads at each point."""

from __future__ import annotations

from collections.abc import Sequence

from spanlab.analysis.families import compare_families, plain, without_ratios
from spanlab.report.analyses.families import families_table, winners_table
from spanlab.report.sweep.data import SweepPoint
from spanlab.settings.analyses import ANALYSES, OF_POINTS
from spanlab.study.analyses.of_points import findings_by_axis, point_entries
from spanlab.study.findings import Findings, Finished


@ANALYSES.register("families")
def families_of_study(finished: Finished) -> Findings:
    """Return the comparison of the families of one study; no speedups where the machine was noisy."""
    compared = compare_families(finished.measured, finished.study.families)
    entry = plain(*(without_ratios(*compared) if finished.noise_sentence("speedups") else compared))
    return Findings(summary={"families": entry}, tables=(families_table(entry),))


@OF_POINTS.register("families")
def families_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return the family that leads at each point: one table and one figure per axis of the sweep."""
    winners = point_entries(points, "families")
    figure = "analyses.families_figure:draw_winners"
    return findings_by_axis("winners", points, winners_table, figure, {"winners": winners})

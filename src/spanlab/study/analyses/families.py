"""The analysis `families`: the best arm of each family of methods, and the family that leads at each point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from spanlab.analysis.families import compare_families, plain, shown_together, without_ratios
from spanlab.report.analyses.families import families_table, winners_table
from spanlab.report.analyses.families_figure import draw_winners
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
    points = _corrected(points)
    winners = point_entries(points, "families")
    figure = draw_winners
    return findings_by_axis("winners", points, winners_table, figure, {"winners": winners})


def _corrected(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """Return the points with leads as they are shown together: `shown`; `shown_alone` is that of the point's study."""
    leads = [point.findings("families")["lead"] for point in points]
    return [
        _with_lead(point, lead and lead | {"shown": shown, "shown_alone": lead["shown"]})
        for point, lead, shown in zip(points, leads, shown_together(leads), strict=True)
    ]


def _with_lead(point: SweepPoint, lead: dict[str, Any] | None) -> SweepPoint:
    return replace(point, summary={**(point.summary or {}), "families": point.findings("families") | {"lead": lead}})

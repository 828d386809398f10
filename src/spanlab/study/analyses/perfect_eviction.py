"""The analysis `perfect_eviction`: the gain of a clairvoyant arm over arms without foresight."""

from __future__ import annotations

from collections.abc import Sequence

from spanlab.analysis.families import MeasuredArm
from spanlab.analysis.perfect_eviction import perfect_eviction
from spanlab.report.analyses.perfect_eviction import arms_table, points_table
from spanlab.report.analyses.perfect_eviction_figure import draw_perfect_eviction
from spanlab.report.sweep.data import SweepPoint
from spanlab.settings.analyses import ANALYSES, OF_POINTS
from spanlab.study.analyses.of_points import findings_by_axis, point_entries
from spanlab.study.findings import Findings, Finished


@ANALYSES.register("perfect_eviction")
def perfect_eviction_of_study(finished: Finished) -> Findings:
    """Return baseline, best arm without foresight and clairvoyant; None where one of them did not run."""
    study, arms = finished.study, finished.measured
    clairvoyants = {arm.name for arm in arms if study.arms[arm.name].foresees}
    reason = _missing_reason(study.baseline, arms, clairvoyants)
    if reason:
        return Findings({"perfect_eviction": None}, caveats=(f"no value of perfect eviction: {reason}",))
    entry = perfect_eviction(arms, study.baseline, clairvoyants).plain()
    return Findings({"perfect_eviction": entry}, tables=(arms_table(entry),))


def _missing_reason(baseline: str, arms: Sequence[MeasuredArm], clairvoyants: set[str]) -> str:
    """Return why the comparison is impossible, or an empty text."""
    bounds = {arm.name: arm.summary["bounds"]["offline_tokens"] for arm in arms if arm.name not in clairvoyants}
    if not clairvoyants:
        return "no clairvoyant ran"
    if baseline not in bounds:
        return f"the baseline {baseline} is not among the arms without foresight that ran"
    return "" if bounds[baseline] is not None else f"no bound of {baseline} is known"


@OF_POINTS.register("perfect_eviction")
def perfect_eviction_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return every point: one table and one figure per axis of the sweep."""
    ran = [point for point in points if (point.summary or {})["perfect_eviction"] is not None]
    summary = {"perfect_eviction": point_entries(ran, "perfect_eviction")}
    figure = draw_perfect_eviction
    return findings_by_axis("perfect_eviction", ran, points_table, figure, summary)

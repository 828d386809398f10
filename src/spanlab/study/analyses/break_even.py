"""The analysis `break_even`: whether position-independent caching pays over prefix caching and cached order."""

from __future__ import annotations

from collections.abc import Sequence

from spanlab.analysis.break_even import STEPS, break_even
from spanlab.report.analyses.break_even import break_even_table, steps_table
from spanlab.report.analyses.break_even_figure import draw_break_even
from spanlab.report.sweep.data import SweepPoint
from spanlab.settings.analyses import ANALYSES, OF_POINTS
from spanlab.study.analyses.of_points import findings_by_axis, point_entries
from spanlab.study.findings import Findings, Finished


@ANALYSES.register("break_even")
def break_even_of_study(finished: Finished) -> Findings:
    """Return the families of one study and the one that suffices; None where a family has no arm that ran."""
    arms, families = finished.measured, finished.study.families
    names = {arm.name for arm in arms}
    missing = [name for name in STEPS if names.isdisjoint(families[name])]
    if missing:
        return Findings({"break_even": None}, caveats=(f"no break-even: no arm of {', '.join(missing)} ran",))
    entry = break_even(arms, families).plain()
    return Findings({"break_even": entry}, tables=(steps_table(entry),))


@OF_POINTS.register("break_even")
def break_even_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return the family that suffices at each point: one table and one figure per axis of the sweep."""
    ran = [point for point in points if (point.summary or {})["break_even"] is not None]
    summary = {"break_even": point_entries(ran, "break_even")}
    figure = draw_break_even
    return findings_by_axis("break_even", ran, break_even_table, figure, summary)

"""The analysis `perfect_eviction`: what a clairvoyant saves over arms without foresight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from spanlab.analysis.families import MeasuredArm
from spanlab.analysis.perfect_eviction import perfect_eviction
from spanlab.report.analyses.perfect_eviction import arms_table, points_table
from spanlab.report.sweep.data import SweepPoint, by_axis
from spanlab.settings.analyses import ANALYSES, OF_POINTS
from spanlab.study.findings import Findings, Finished

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@ANALYSES.register("perfect_eviction")
def perfect_eviction_of_study(finished: Finished) -> Findings:
    """Baseline, best arm without foresight and clairvoyant; nothing where one of them did not run."""
    study = finished.study
    arms = [MeasuredArm(one.data.name, one.data.summary, one.ttft_sums) for one in finished.results]
    knowing = {arm.name for arm in arms if study.arms[arm.name].foresees}
    lost = _lacking(study.baseline, arms, knowing)
    if lost:
        return Findings({"perfect_eviction": None}, caveats=(f"what perfect eviction is worth is not told: {lost}",))
    found = perfect_eviction(arms, study.baseline, knowing).plain()
    return Findings({"perfect_eviction": found}, tables=(arms_table(found),))


def _lacking(baseline: str, arms: Sequence[MeasuredArm], knowing: set[str]) -> str:
    """Why nothing can be told, if so."""
    bounds = {arm.name: arm.summary["bounds"]["offline_tokens"] for arm in arms if arm.name not in knowing}
    if not knowing:
        return "no clairvoyant ran"
    if baseline not in bounds:
        return f"the baseline {baseline} is none of the arms without foresight that ran"
    return "" if bounds[baseline] is not None else f"no bound of {baseline} is known"


@OF_POINTS.register("perfect_eviction")
def perfect_eviction_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Every point: one table and one figure for each axis of the sweep."""
    ran = [point for point in points if point.summary is not None and point.summary["perfect_eviction"] is not None]
    groups = {f"perfect_eviction_{number}": group for number, group in enumerate(by_axis(ran).values(), 1)}
    told = [{"settings": dict(one.settings), **(one.summary or {})["perfect_eviction"]} for one in ran]
    return Findings(
        summary={"perfect_eviction": told},
        tables=tuple(points_table(name, group) for name, group in groups.items()),
        figures={name: partial(_draw, group) for name, group in groups.items()},
    )


def _draw(points: Sequence[SweepPoint]) -> Figure | None:
    # Here, for matplotlib takes half a second that only drawing needs.
    from spanlab.report.analyses.perfect_eviction_figure import (
        draw_perfect_eviction,
    )

    return draw_perfect_eviction(points)

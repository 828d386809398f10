"""The analysis `break_even`: whether position-independent caching pays beside prefix caching and cached order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from spanlab.analysis.break_even import STEPS, break_even
from spanlab.analysis.families import MeasuredArm
from spanlab.report.analyses.break_even import break_even_table, steps_table
from spanlab.report.sweep.data import SweepPoint, by_axis
from spanlab.settings.analyses import ANALYSES, OF_POINTS
from spanlab.study.findings import Findings, Finished

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@ANALYSES.register("break_even")
def break_even_of_study(finished: Finished) -> Findings:
    """The families of one study, and which of them suffices; nothing where one has no arm that ran."""
    arms = [MeasuredArm(one.data.name, one.data.summary, one.ttft_sums) for one in finished.results]
    names, families = {arm.name for arm in arms}, finished.study.families
    lost = [name for name in STEPS if names.isdisjoint(families[name])]
    if lost:
        return Findings({"break_even": None}, caveats=(f"no break-even is told: no arm of {', '.join(lost)} ran",))
    found = break_even(arms, families).plain()
    return Findings({"break_even": found}, tables=(steps_table(found),))


@OF_POINTS.register("break_even")
def break_even_of_points(points: Sequence[SweepPoint]) -> Findings:
    """The map: which family suffices at which point, one table and one figure for each axis of the sweep."""
    ran = [point for point in points if point.summary is not None and point.summary["break_even"] is not None]
    groups = {f"break_even_{number}": group for number, group in enumerate(by_axis(ran).values(), 1)}
    return Findings(
        summary={"break_even": [{"settings": dict(one.settings), **(one.summary or {})["break_even"]} for one in ran]},
        tables=tuple(break_even_table(name, group) for name, group in groups.items()),
        figures={name: partial(_draw, group) for name, group in groups.items()},
    )


def _draw(points: Sequence[SweepPoint]) -> Figure:
    from spanlab.report.analyses.break_even_figure import (
        draw_break_even,  # matplotlib: half a second that only drawing needs
    )

    return draw_break_even(points)

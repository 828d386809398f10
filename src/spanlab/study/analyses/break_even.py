"""The analysis `break_even`: whether position-independent caching pays over prefix caching and cached order."""

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
    """Return the families of one study and the one that suffices; None where a family has no arm that ran."""
    arms = [MeasuredArm(result.data.name, result.data.summary, result.ttft_sums) for result in finished.results]
    names, families = {arm.name for arm in arms}, finished.study.families
    missing = [name for name in STEPS if names.isdisjoint(families[name])]
    if missing:
        return Findings({"break_even": None}, caveats=(f"no break-even: no arm of {', '.join(missing)} ran",))
    entry = break_even(arms, families).plain()
    return Findings({"break_even": entry}, tables=(steps_table(entry),))


@OF_POINTS.register("break_even")
def break_even_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return the family that suffices at each point: one table and one figure per axis of the sweep."""
    ran = [point for point in points if point.summary is not None and point.summary["break_even"] is not None]
    groups = {f"break_even_{number}": group for number, group in enumerate(by_axis(ran).values(), 1)}
    return Findings(
        summary={
            "break_even": [{"settings": dict(point.settings), **(point.summary or {})["break_even"]} for point in ran]
        },
        tables=tuple(break_even_table(name, group) for name, group in groups.items()),
        figures={name: partial(_draw, group) for name, group in groups.items()},
    )


def _draw(points: Sequence[SweepPoint]) -> Figure:
    from spanlab.report.analyses.break_even_figure import (
        draw_break_even,  # matplotlib: half a second that only drawing needs
    )

    return draw_break_even(points)

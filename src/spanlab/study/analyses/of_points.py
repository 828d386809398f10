"""Parts of the findings over all points of a sweep that several analyses share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from spanlab.report.sweep.data import SweepPoint, by_axis
from spanlab.report.tables import Table
from spanlab.study.findings import Findings

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def point_entries(points: Sequence[SweepPoint], key: str) -> list[dict[str, Any]]:
    """Return the settings of each point with the entry `key` of its summary."""
    return [{"settings": dict(point.settings), **point.findings(key)} for point in points]


def findings_by_axis(
    name: str,
    points: Sequence[SweepPoint],
    table: Callable[[str, list[SweepPoint]], Table],
    figure: Callable[..., Figure | None],
    summary: dict[str, Any],
) -> Findings:
    """Return one table and one figure per axis of the sweep, `name`_1 and so on; `figure` draws a group of points."""
    groups = {f"{name}_{number}": group for number, group in enumerate(by_axis(points).values(), 1)}
    return Findings(
        summary=summary,
        tables=tuple(table(axis, group) for axis, group in groups.items()),
        figures={axis: partial(figure, group) for axis, group in groups.items()},
    )

"""The figure of the analysis `break_even`: points where PIC pays, and points where an exact method suffices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spanlab.report.analyses.break_even import VERDICTS
from spanlab.report.sweep.data import SweepPoint
from spanlab.report.sweep.point_grid import COLOURS, GridCell, draw_grid
from spanlab.report.units import MISSING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = dict(zip(VERDICTS, COLOURS, strict=False))


def draw_break_even(points: Sequence[SweepPoint]) -> Figure:
    """Draw a cell per point of a product of settings, coloured by the verdict."""
    legend = {label: _COLOURS[verdict] for verdict, label in VERDICTS.items()}
    title = "Where PIC pays: gain of repaired / plain over the best exact method"
    return draw_grid(points, title, legend, (), _cell)


def _cell(point: SweepPoint) -> GridCell:
    findings = point.findings("break_even")
    gains = {step["family"]: step["gain"] for step in findings["steps"]}
    return GridCell(_COLOURS[findings["verdict"]], f"{_short(gains['repaired'])} / {_short(gains['plain'])}")


def _short(gain: dict[str, Any] | None) -> str:
    return MISSING if gain is None else f"{gain['mean']:.2g}"

"""The table of the analysis `bars`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanlab.analysis.bars import Verdict, judged
from spanlab.report import cells
from spanlab.report.tables import Cell, Column, Table

_COLUMNS = (
    Column("point", "point", left=True),
    Column("arm", "arm", left=True),
    Column("what", "number", left=True),
    Column("value", "measured"),
    Column("bar", "bar"),
    Column("verdict", "verdict", left=True),
    Column("name", "", left=True),
)


def bars_table(points: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> Table:
    """A row per number of every point; the title says how many bars are cleared."""
    found = [(point, judged(told)) for point, own in points for told in own]
    asked = [verdict for _, verdict in found if verdict.judged]
    title = f"Bars: {sum(verdict.holds for verdict in asked)} of {len(asked)} are cleared"
    return Table("bars", title, _COLUMNS, tuple(_row(point, verdict) for point, verdict in found))


def _row(point: str, verdict: Verdict) -> tuple[Cell, ...]:
    said = ("clears" if verdict.holds else "misses") if verdict.judged else ""
    return (
        cells.word(point),
        cells.word(verdict.arm),
        cells.word(verdict.what),
        Cell(verdict.value, f"{verdict.value:.4g}"),
        cells.word(verdict.words),
        cells.word(said),
        cells.hidden(verdict.bar),
    )

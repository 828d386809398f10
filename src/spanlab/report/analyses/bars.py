"""The table of the analysis `bars`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanlab.analysis.bars import Verdict, verdict_of
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
    """Return a row per number of every point; the title counts the bars that are cleared."""
    verdicts = [(point, verdict_of(entry)) for point, entries in points for entry in entries]
    decided = [verdict for _, verdict in verdicts if verdict.judged]
    title = f"Bars: {sum(verdict.holds for verdict in decided)} of {len(decided)} are cleared"
    return Table("bars", title, _COLUMNS, tuple(_row(point, verdict) for point, verdict in verdicts))


def _row(point: str, verdict: Verdict) -> tuple[Cell, ...]:
    outcome = ("clears" if verdict.holds else "misses") if verdict.judged else ""
    return (
        cells.word(point),
        cells.word(verdict.arm),
        cells.word(verdict.what),
        Cell(verdict.value, f"{verdict.value:.4g}"),
        cells.word(verdict.limits),
        cells.word(outcome),
        cells.hidden(verdict.bar),
    )

"""The tables of a sweep: every row, and one table per swept setting with a column per value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields

from spanlab.report import cells
from spanlab.report.sweep.data import SweepPoint, SweepRow, Value, axis_name, by_axis, sweep_rows, value_text
from spanlab.report.tables import Cell, Column, Table

_RATE_NOTE = "token hit rate = reused ÷ prompt tokens; [a, b] = 95 % interval of the point's own summary"
_TTFT_NOTE = "TTFT = first token − arrival, queueing included; – = saturated, no steady-state delay"


def sweep_tables(points: Sequence[SweepPoint]) -> tuple[Table, ...]:
    """Every table of a sweep: rates by setting, times by setting, rows."""
    return *rate_tables(points), *ttft_tables(points), rows_table(points)


def rows_table(points: Sequence[SweepPoint]) -> Table:
    """Return one row per arm and point, for CSV and the tracker only; rates are shares of prompt tokens."""
    columns = tuple(Column(field.name, "") for field in fields(SweepRow))
    rows = [tuple(map(cells.hidden, asdict(row).values())) for row in sweep_rows(points)]
    return Table("sweep", "Every arm at every point", columns, tuple(rows))


def rate_tables(points: Sequence[SweepPoint]) -> tuple[Table, ...]:
    """Token hit rate by arm and value, one table per swept setting."""
    return tuple(
        _table("token_hit_rate", "token hit rate", key, group, _rate, _RATE_NOTE) for key, group in _groups(points)
    )


def ttft_tables(points: Sequence[SweepPoint]) -> tuple[Table, ...]:
    """Mean TTFT by arm and value, one table per swept setting."""
    return tuple(_table("ttft_mean_s", "mean TTFT", key, group, _ttft, _TTFT_NOTE) for key, group in _groups(points))


def _groups(points: Sequence[SweepPoint]) -> list[tuple[str, list[SweepPoint]]]:
    return [(key, list({point.value: point for point in group}.values())) for key, group in by_axis(points).items()]


def _table(
    name: str, label: str, key: str, points: list[SweepPoint], cell: Callable[[SweepRow], Cell], note: str
) -> Table:
    """Return a row per arm and a column per value; transposed where an axis combines settings."""
    cells_by_arm = {(row.arm, row.value): cell(row) for row in sweep_rows(points)}
    arms, values = list(dict.fromkeys(arm for arm, _ in cells_by_arm)), [point.value for point in points]
    text = {value: value_text(value) for value in values}
    file, title = f"{name}_by_{key.replace('/', ':').replace(' ', '+')}", f"{label} by {axis_name(key)}"
    if len(points[0].settings) > 1:
        columns = (Column("point", "point", left=True), *(Column(arm, arm) for arm in arms))
        lines = [(cells.word(text[value]), *(_cell_at(cells_by_arm, arm, value) for arm in arms)) for value in values]
    else:
        columns = (Column("arm", "arm", left=True), *(Column(str(value), text[value]) for value in values))
        lines = [(cells.word(arm), *(_cell_at(cells_by_arm, arm, value) for value in values)) for arm in arms]
    return Table(file, title, columns, tuple(lines), (note,))


def _cell_at(cells_by_arm: Mapping[tuple[str, Value], Cell], arm: str, value: Value) -> Cell:
    return cells_by_arm.get((arm, value), cells.placeholder("failed"))


def _rate(row: SweepRow) -> Cell:
    return cells.percent_interval((row.token_hit_rate, row.token_hit_rate_low, row.token_hit_rate_high))


def _ttft(row: SweepRow) -> Cell:
    return cells.seconds_interval((row.ttft_mean_s, row.ttft_mean_s_low, row.ttft_mean_s_high))


def failures(points: Sequence[SweepPoint]) -> list[str]:
    """Return one sentence for each point that failed in full or in part."""
    return list(dict.fromkeys(point.failure for point in points if point.failure))

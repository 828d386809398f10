"""The table of a sweep: arm by point, token hit rate with its interval; for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spanlab.report import units
from spanlab.report.sweep_data import SweepPoint, SweepRow, axis_name, by_axis, sweep_rows, value_text

NOTE = "token hit rate = reused ÷ prompt tokens; [a, b] = 95 % interval of the point's own summary"

Cells = list[str]


def print_sweep(points: Sequence[SweepPoint], console: Console) -> None:
    """Print one table per swept setting, then the points that failed."""
    for key, group in by_axis(points).items():
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        head, *rows = sweep_cells(group)
        table.add_column(head[0], style="bold", no_wrap=True)
        for heading in head[1:]:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(Text(f"token hit rate by {axis_name(key)}", style="bold"), table)
    console.print(Text("\n".join([NOTE, *failures(points)]), style="dim"))


def sweep_cells(points: Sequence[SweepPoint], intervals: bool = True) -> list[Cells]:
    """One swept setting as text: a heading, then one row per arm."""
    rates = {(row.arm, row.value): row for row in sweep_rows(points)}
    arms = list(dict.fromkeys(row.arm for row in rates.values()))
    head = ["arm", *(value_text(point.value) for point in points)]
    return [head, *([arm, *_cells(rates, arm, points, intervals)] for arm in arms)]


def _cells(
    rates: Mapping[tuple[str, str | float], SweepRow], arm: str, points: Sequence[SweepPoint], intervals: bool
) -> Cells:
    rows = [rates.get((arm, point.value)) for point in points]
    return ["failed" if row is None else _rate(row, intervals) for row in rows]


def _rate(row: SweepRow, intervals: bool) -> str:
    low, high = row.token_hit_rate_low, row.token_hit_rate_high
    if low is None or high is None or not intervals:
        return units.percent(row.token_hit_rate)
    return f"{100 * row.token_hit_rate:.1f} [{100 * low:.1f}, {100 * high:.1f}] %"


def failures(points: Sequence[SweepPoint]) -> list[str]:
    """One sentence for each point that failed, wholly or in part."""
    return list(dict.fromkeys(point.failure for point in points if point.failure))


def markdown(points: Sequence[SweepPoint], intervals: bool = True) -> str:
    """One swept setting as a Markdown table."""
    head, *rows = sweep_cells(points, intervals)
    lines = [head, ["---"] * len(head), *([f"`{row[0]}`", *row[1:]] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)

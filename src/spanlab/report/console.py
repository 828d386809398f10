"""Tables as terminal text, with as many columns as the width allows."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from spanlab.report.tables import Column, Table

DEFAULT_WIDTH = 160
_GAP = 3  # padding, and a blank in place of the vertical line of a box
_SHORTEST_NAME = 4


def as_renderable(tables: Sequence[Table], width: int = DEFAULT_WIDTH) -> Group:
    """Title and rows of each table, then the notes of all, each note once."""
    parts: list[RenderableType] = []
    notes: dict[str, None] = {}
    for table in tables:
        shown, dropped = fitted(table, width)
        parts += [Text(table.title), Text(), _rich(shown, width), Text()]
        names = [column.heading.replace("\n", " ") for column in dropped if not column.explains]
        too_narrow = [f"too narrow for: {', '.join(names)}"] if names else []
        notes |= dict.fromkeys([*table.notes, *too_narrow, *_explanations(table, dropped)])
    return Group(*parts, Text("\n".join(notes), style="dim"))


def _explanations(table: Table, dropped: Sequence[Column]) -> list[str]:
    """Return a note for each row about the cells of dropped columns that explain rows."""
    numbers = [number for number, column in enumerate(table.columns) if column in dropped and column.explains]
    return [f"{row[0].text}: {row[number].text}" for number in numbers for row in table.rows]


def as_text(tables: Sequence[Table], width: int = DEFAULT_WIDTH) -> str:
    """The tables as plain text, no line longer than `width`."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(as_renderable(tables, width))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def print_tables(tables: Sequence[Table], console: Console) -> None:
    """Print the tables at the width of the terminal or COLUMNS, and with all columns to a file or a pipe."""
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = max(console.width, *(sum(_widths(table.shown())) + _gaps(table) for table in tables))
    console.print(as_renderable(tables, console.width))


def _gaps(table: Table) -> int:
    return _GAP * (len(table.shown().columns) - 1)


def fitted(table: Table, width: int) -> tuple[Table, list[Column]]:
    """The table with the columns that fit into `width` characters, and the other columns."""
    shown = table.shown()
    numbers = list(range(len(shown.columns)))
    widths = _widths(shown)
    while sum(widths[n] for n in numbers) + _GAP * (len(numbers) - 1) > width:
        last = max(shown.columns[n].keep for n in numbers)
        if last == 0:
            break
        numbers = [n for n in numbers if shown.columns[n].keep < last]
    dropped = [column for n, column in enumerate(shown.columns) if n not in numbers]
    return shown.with_columns(numbers), dropped


def _widths(table: Table) -> list[int]:
    """Characters of the widest line of each column."""
    texts = [
        [*column.heading.split("\n"), *(row[n].text for row in table.rows)] for n, column in enumerate(table.columns)
    ]
    return [max(map(len, lines)) for lines in texts]


def _rich(table: Table, width: int) -> RichTable:
    rich = RichTable(box=SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), pad_edge=False, show_edge=False)
    available = width - sum(_GAP + column_width for column_width in _widths(table)[1:])
    for number, column in enumerate(table.columns):
        if number == 0:
            name_width = max(min(_widths(table)[0], available), _SHORTEST_NAME)
            rich.add_column(column.heading, no_wrap=True, overflow="ellipsis", max_width=name_width, style="bold")
        else:
            rich.add_column(column.heading, justify="left" if column.left else "right", no_wrap=True)
    for row in table.rows:
        rich.add_row(*(Text(cell.text) for cell in row))
    return rich

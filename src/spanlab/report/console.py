"""The face of a table for the terminal: as many columns as the width allows."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from spanlab.report.tables import Table

DEFAULT_WIDTH = 160
_GAP = 3  # padding, and the blank where the box would draw a line
_SHORTEST_NAME = 4


def as_renderable(tables: Sequence[Table], width: int = DEFAULT_WIDTH) -> Group:
    """Title and rows of each table, then the notes of all, each note once."""
    parts: list[RenderableType] = []
    notes: dict[str, None] = {}
    for table in tables:
        kept, dropped = fitted(table, width)
        parts += [Text(table.title), Text(), _rich(kept, width), Text()]
        notes |= dict.fromkeys([*table.notes, *([f"too narrow for: {', '.join(dropped)}"] if dropped else [])])
    return Group(*parts, Text("\n".join(notes), style="dim"))


def as_text(tables: Sequence[Table], width: int = DEFAULT_WIDTH) -> str:
    """The tables as plain text, no line longer than `width`."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(as_renderable(tables, width))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def print_tables(tables: Sequence[Table], console: Console) -> None:
    """Print the tables: as wide as a terminal or COLUMNS allows, with all columns to a file or a pipe."""
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = max(console.width, *(sum(_widths(table.shown())) + _gaps(table) for table in tables))
    console.print(as_renderable(tables, console.width))


def _gaps(table: Table) -> int:
    return _GAP * (len(table.shown().columns) - 1)


def fitted(table: Table, width: int) -> tuple[Table, list[str]]:
    """The table with the columns that fit into `width` characters, and the headings of the others."""
    shown = table.shown()
    kept = list(range(len(shown.columns)))
    widths = _widths(shown)
    while sum(widths[n] for n in kept) + _GAP * (len(kept) - 1) > width:
        last = max(shown.columns[n].keep for n in kept)
        if last == 0:
            break
        kept = [n for n in kept if shown.columns[n].keep < last]
    dropped = [column.heading.replace("\n", " ") for n, column in enumerate(shown.columns) if n not in kept]
    return shown.with_columns(kept), dropped


def _widths(table: Table) -> list[int]:
    """Characters of the widest line of each column."""
    texts = [
        [*column.heading.split("\n"), *(row[n].text for row in table.rows)] for n, column in enumerate(table.columns)
    ]
    return [max(map(len, lines)) for lines in texts]


def _rich(table: Table, width: int) -> RichTable:
    rich = RichTable(box=SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), pad_edge=False, show_edge=False)
    room = width - sum(_GAP + own for own in _widths(table)[1:])
    for number, column in enumerate(table.columns):
        if number == 0:
            name = max(min(_widths(table)[0], room), _SHORTEST_NAME)
            rich.add_column(column.heading, no_wrap=True, overflow="ellipsis", max_width=name, style="bold")
        else:
            rich.add_column(column.heading, justify="left" if column.left else "right", no_wrap=True)
    for row in table.rows:
        rich.add_row(*(Text(cell.text) for cell in row))
    return rich

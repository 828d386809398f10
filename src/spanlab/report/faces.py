"""Tables as Markdown, CSV, HTML, JSON and rows for the tracker."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import orjson

from spanlab.report.tables import Cell, Column, Table, Value

#: File with all tables of a run in full, for publishing.
STORED = "tables.json"


def markdown(table: Table) -> str:
    """Return the visible columns as a Markdown table, without title and notes; names of rows are code."""
    shown = table.shown()
    head = [_escaped(column.heading) for column in shown.columns]
    marks = ["---" if column.left else "---:" for column in shown.columns]
    rows = [[_markdown_cell(cell, column, n == 0) for n, (cell, column) in _pairs(shown, row)] for row in shown.rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, marks, *rows))


def _markdown_cell(cell: Cell, column: Column, first: bool) -> str:
    text = _escaped(cell.text)
    return f"`{text}`" if first and column.left else text


def _escaped(text: str) -> str:
    return _one_line(text).replace("|", "\\|")


def csv_text(table: Table) -> str:
    """All columns as comma-separated values; an absent value is an empty field."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([column.name for column in table.columns])
    writer.writerows([cell.value for cell in row] for row in table.rows)
    return file.getvalue()


def write(tables: Sequence[Table], folder: Path) -> None:
    """Write each table to `tables/NAME.csv`, and all tables in full to `tables.json`."""
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    for table in tables:
        (folder / "tables" / f"{table.name}.csv").write_text(csv_text(table))
    (folder / STORED).write_bytes(orjson.dumps([asdict(table) for table in tables]) + b"\n")


def read(folder: Path) -> dict[str, Table]:
    """Return the tables of a finished run by name."""
    return {stored["name"]: _table(stored) for stored in orjson.loads((folder / STORED).read_bytes())}


def _table(stored: dict[str, Any]) -> Table:
    rows = tuple(tuple(Cell(**cell) for cell in row) for row in stored["rows"])
    columns = tuple(Column(**column) for column in stored["columns"])
    return Table(stored["name"], stored["title"], columns, rows, tuple(stored["notes"]))


def html(table: Table) -> str:
    """Return the visible columns as an HTML table; `data-value` of a cell is its sort key."""
    shown = table.shown()
    head = "".join(f"<th{_class(column)}>{_lines(column.heading)}</th>" for column in shown.columns)
    rows = ["".join(_html_cell(cell, column) for _, (cell, column) in _pairs(shown, row)) for row in shown.rows]
    body = "".join(f"<tr>{row}</tr>\n" for row in rows)
    return f'<table class="sortable">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n'


def _html_cell(cell: Cell, column: Column) -> str:
    value = "" if cell.value is None else f' data-value="{escape(str(cell.value))}"'
    return f"<td{_class(column)}{value}>{_lines(cell.text)}</td>"


def _class(column: Column) -> str:
    return ' class="name"' if column.left else ""


def _lines(text: str) -> str:
    return escape(text).replace("\n", "<br>")


def tracker_rows(table: Table) -> tuple[list[str], list[list[Value]]]:
    """Return the names of all columns and the rows of their values, for the tracker."""
    return [column.name for column in table.columns], [[cell.value for cell in row] for row in table.rows]


def _pairs(table: Table, row: tuple[Cell, ...]) -> enumerate[tuple[Cell, Column]]:
    return enumerate(zip(row, table.columns, strict=True))


def _one_line(text: str) -> str:
    return " ".join(text.split("\n"))

"""Tables: their model, fields, and faces for terminal, Markdown, CSV, HTML and the tracker."""

from __future__ import annotations

import base64
import csv
import io
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import orjson
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from spanlab.stats import Interval

# ------------------------------------------------------------------------------
# Numbers as short text.
# ------------------------------------------------------------------------------

MISSING_TEXT = "–"
Ends = tuple[float, float]


def percent_text(rate: float | None, ends: Ends | None = None) -> str:
    """A share in percent, with the ends of its interval where there is one: 63.1 %, 63.1 [60.2,
    65.9] %."""
    if rate is None:
        return MISSING_TEXT
    between = "" if ends is None else f" [{100 * ends[0]:.1f}, {100 * ends[1]:.1f}]"
    return f"{100 * rate:.1f}{between} %"


def count_text(value: float) -> str:
    """A large count with four digits: 15.53 M."""
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= size:
            scale = 1e3 if unit == " k" else size
            return f"{value / scale:#.4g}{unit}".replace(". ", " ")
    return f"{value:.0f}"


def byte_size_text(value: float) -> str:
    """Bytes in binary units: 11.2 GiB."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{significant(value)} {unit}"


def seconds_text(value: float | None, ends: Ends | None = None) -> str:
    """A duration, with the ends of its interval where there is one: 412 ms, 1.52 [1.44, 1.61] s."""
    if value is None:
        return MISSING_TEXT
    scale, unit = (1e3, "ms") if abs(value) < 1 else (1.0, "s")
    return f"{_with_ends(scale, value, ends)} {unit}"


def ratio_text(value: float | None, ends: Ends | None = None) -> str:
    """A factor, with the ends of its interval where there is one: 3.41 [3.29, 3.53] ×."""
    if value is None:
        return MISSING_TEXT
    return f"{_with_ends(1.0, value, ends)} ×"


def nats_text(value: float, ends: Ends | None = None) -> str:
    """A loss with three decimals, and with the ends of its interval where there is one: 0.412
    [0.398, 0.430]."""
    return f"{value:.3f}" if ends is None else f"{value:.3f} [{ends[0]:.3f}, {ends[1]:.3f}]"


def significant(value: float) -> str:
    """Three significant digits, trailing zeros kept, never an exponent: 0.0420, 4.20, 42.0, 420."""
    return f"{value:.{_decimals(value)}f}"


def rounded_up(value: float, digits: int = 5) -> float:
    """Return the value rounded up to `digits` significant digits, up to floating-point error."""
    return _rounded(value, digits, lambda units: math.ceil(units - 1e-9))


def rounded_down(value: float, digits: int = 5) -> float:
    """Return the value rounded down to `digits` significant digits, up to floating-point error."""
    return _rounded(value, digits, lambda units: math.floor(units + 1e-9))


def _rounded(value: float, digits: int, to_whole: Callable[[float], int]) -> float:
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
    return float(f"{to_whole(value / unit) * unit:.{digits}g}")


def _with_ends(scale: float, value: float, ends: Ends | None) -> str:
    # all with the decimals of the value: 97.7 [90.5, 105.1]
    if ends is None:
        return significant(scale * value)
    digits = _decimals(scale * value)
    low, high = (f"{scale * end:.{digits}f}" for end in ends)
    return f"{significant(scale * value)} [{low}, {high}]"


def _decimals(value: float) -> int:
    if value == 0:
        return 0
    # rounded first, so that 9.999 counts as 10.0
    return min(max(2 - math.floor(math.log10(float(f"{abs(value):.2e}"))), 0), 6)


# ------------------------------------------------------------------------------
# The model of a table: values for programs and text for readers. Functions of this file render it.
# ------------------------------------------------------------------------------

Value = float | int | str | bool | None


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table.

    value  read by CSV, the tracker and the sort order of HTML; None where it is missing
    text   shown to readers
    """

    value: Value
    text: str


MISSING = Cell(None, MISSING_TEXT)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    name     heading in CSV and in the tracker, with the unit: ttft_mean_s
    heading  heading for readers, two lines at most; empty: only CSV and the tracker have the column
    keep     order in which a narrow terminal drops columns, the highest first; 0: never dropped
    left     aligned to the left, as names are
    explains  whether its cells describe the rows: where it is dropped, they are notes below the
              table
    """

    name: str
    heading: str
    keep: int = 0
    left: bool = False
    explains: bool = False


@dataclass(frozen=True)
class Table:
    """A named table; the first column names the rows.

    title  one line or more above the table; the first line is its heading
    notes  lines below the table
    Raises ValueError where two columns share a name, or a row does not have one cell per column.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names):
            raise ValueError(f"columns of table {self.name}={names}: expected different names")
        for row in self.rows:
            if len(row) != len(names):
                raise ValueError(
                    f"cells of a row of table {self.name}={len(row)}: expected {len(names)}"
                )

    def shown(self) -> Table:
        """Return the table with the visible columns only."""
        return self.with_columns(
            [number for number, column in enumerate(self.columns) if column.heading]
        )

    def with_columns(self, numbers: list[int]) -> Table:
        """Return the table with the columns of these numbers only."""
        columns = tuple(self.columns[number] for number in numbers)
        rows = tuple(tuple(row[number] for number in numbers) for row in self.rows)
        return Table(self.name, self.title, columns, rows, self.notes)


# ------------------------------------------------------------------------------
# Formats of cells: each makes a cell, the value with its short text, of a value that may be
# missing.
# ------------------------------------------------------------------------------

#: A mean with the ends of its interval: an `Interval`, or its entry of `summary.json`, by name or
#: in order.
Estimate = Mapping[str, Any] | Sequence[Any] | None


def word(text: str) -> Cell:
    """A cell whose value is its text."""
    return Cell(text, text)


def placeholder(text: str) -> Cell:
    """Text in place of a missing value."""
    return Cell(None, text)


def hidden(value: Value) -> Cell:
    """A value of a column that only CSV and the tracker have."""
    return Cell(value, "")


def percent(share: float | None) -> Cell:
    """A share between 0 and 1, shown in percent."""
    return Cell(share, percent_text(share))


def signed_percent(share: float | None) -> Cell:
    """A relative error, shown in percent with its sign."""
    return MISSING if share is None else Cell(share, f"{100 * share:+.1f} %")


def seconds(value: float | None) -> Cell:
    """A duration in seconds."""
    return Cell(value, seconds_text(value))


def ratio(value: float | None) -> Cell:
    """A factor."""
    return Cell(value, ratio_text(value))


def count(value: float | None) -> Cell:
    """A count, shown with four digits."""
    return MISSING if value is None else Cell(value, count_text(value))


def byte_size(value: float | None) -> Cell:
    """Bytes, shown in binary units."""
    return MISSING if value is None else Cell(value, byte_size_text(value))


def short(value: float | None) -> Cell:
    """A number, shown with three digits."""
    return MISSING if value is None else Cell(value, significant(value))


def number_format(spec: str) -> Callable[[float | None], Cell]:
    """Return the format of a number with this format specification, such as `.1f`."""
    return lambda value: MISSING if value is None else Cell(value, format(value, spec))


def estimate(show: Callable[[float, Ends | None], str]) -> Callable[[Estimate], Cell]:
    """Return the format of a mean with the ends of its interval, both given to `show`; missing
    without a mean."""

    def cell(value: Estimate) -> Cell:
        if value is None:
            return MISSING
        interval = (
            Interval(value["mean"], value["low"], value["high"])
            if isinstance(value, Mapping)
            else Interval(*value)
        )
        return (
            MISSING
            if interval.mean is None
            else Cell(interval.mean, show(interval.mean, interval.ends))
        )

    return cell


one_decimal = number_format(".1f")
percent_interval = estimate(percent_text)
seconds_interval = estimate(seconds_text)
ratio_interval = estimate(ratio_text)
nats_interval = estimate(nats_text)


# ------------------------------------------------------------------------------
# Tables by declaration: a field is a column, the value that it reads from a row, and the format
# of its cell.
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """One column of a table, and its cell of any row.

    name, heading, keep, left, explains  as in `Column`
    cell   the format: makes the cell of a value, also of a missing one
    value  the value of a row: a path such as `ttft_s.mean` or `speedup.-1` of keys, attributes and
           indices, which is None where an entry on the way is None; or a function of the row. The
           path is `name` where it is not given
    empty  values without information: a column with these alone is in CSV and the tracker only
    """

    name: str
    heading: str
    cell: Callable[[Any], Cell]
    value: str | Callable[[Any], Any] = ""
    keep: int = 0
    left: bool = False
    empty: tuple[Value, ...] = ()
    explains: bool = False

    def of(self, row: Any) -> Cell:
        """Return the cell of a row."""
        if callable(self.value):
            return self.cell(self.value(row))
        for key in self.value.split(".") if self.value else [self.name]:
            row = _entry(row, key)
        return self.cell(row)

    def column(self, cells: Sequence[Cell]) -> Column:
        """Return the column of these cells, hidden where none has information."""
        shown = not cells or any(cell.value not in self.empty for cell in cells)
        return Column(self.name, self.heading if shown else "", self.keep, self.left, self.explains)


def _entry(row: Any, key: str) -> Any:
    if row is None:
        return None
    if isinstance(row, Sequence) and key.lstrip("-").isdigit():
        return row[int(key)]
    return row[key] if isinstance(row, Mapping) else getattr(row, key)


def whole(row: Any) -> Any:
    """Return the row itself: the value of a field whose format reads several entries."""
    return row


def with_ends(field: Field, names: str = "") -> tuple[Field, ...]:
    """Return the field of an estimate, and both ends of its interval for CSV and the tracker.

    `names`  pattern of the names of the ends; {} stands for `low` or `high`
    """
    pattern = names or f"{field.name}_{{}}"
    return field, *(_end_of(field, pattern.format(end), end) for end in ("low", "high"))


def _end_of(field: Field, name: str, end: str) -> Field:
    return replace(
        field,
        name=name,
        heading="",
        cell=lambda estimate: hidden(_entry(estimate, end)),
        value=field.value or field.name,
        keep=0,
        left=False,
    )


def tabulate(
    name: str, title: str, fields: Sequence[Field], rows: Iterable[Any], notes: Sequence[str] = ()
) -> Table:
    """Return the table with a row of cells for each of `rows`."""
    lines = tuple(tuple(field.of(row) for field in fields) for row in rows)
    columns = tuple(
        field.column([line[number] for line in lines]) for number, field in enumerate(fields)
    )
    return Table(name, title, columns, lines, tuple(notes))


# ------------------------------------------------------------------------------
# Tables as Markdown, CSV, HTML, JSON and rows for the tracker.
# ------------------------------------------------------------------------------

#: File with all tables of a run in full, for publishing.
STORED = "tables.json"


def markdown(table: Table) -> str:
    """Return the visible columns as a Markdown table, without title and notes; names of rows are
    code."""
    shown = table.shown()
    head = [_escaped(column.heading) for column in shown.columns]
    marks = ["---" if column.left else "---:" for column in shown.columns]
    rows = []
    for row in shown.rows:
        texts = [_escaped(cell.text) for cell in row]
        if shown.columns[0].left:
            texts[0] = f"`{texts[0]}`"
        rows.append(texts)
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, marks, *rows))


def _escaped(text: str) -> str:
    return " ".join(text.split("\n")).replace("|", "\\|")


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
    tables = {}
    for stored in orjson.loads((folder / STORED).read_bytes()):
        rows = tuple(tuple(Cell(**cell) for cell in row) for row in stored["rows"])
        columns = tuple(Column(**column) for column in stored["columns"])
        tables[stored["name"]] = Table(
            stored["name"], stored["title"], columns, rows, tuple(stored["notes"])
        )
    return tables


def html(table: Table) -> str:
    """Return the visible columns as an HTML table; `data-value` of a cell is its sort key."""
    shown = table.shown()
    head = "".join(f"<th{_class(column)}>{_lines(column.heading)}</th>" for column in shown.columns)
    body = ""
    for row in shown.rows:
        body += "<tr>"
        for cell, column in zip(row, shown.columns, strict=True):
            value = "" if cell.value is None else f' data-value="{escape(str(cell.value))}"'
            body += f"<td{_class(column)}{value}>{_lines(cell.text)}</td>"
        body += "</tr>\n"
    return f'<table class="sortable">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n'


def _class(column: Column) -> str:
    return ' class="long"' if column.explains else ' class="name"' if column.left else ""


def _lines(text: str) -> str:
    return escape(text).replace("\n", "<br>")


def tracker_rows(table: Table) -> tuple[list[str], list[list[Value]]]:
    """Return the names of all columns and the rows of their values, for the tracker."""
    return [column.name for column in table.columns], [
        [cell.value for cell in row] for row in table.rows
    ]


# ------------------------------------------------------------------------------
# Tables as terminal text, with as many columns as the width allows.
# ------------------------------------------------------------------------------

DEFAULT_WIDTH = 160
_GAP = 3  # padding, and a blank in place of the vertical line of a box
_SHORTEST_NAME = 4


def as_renderable(tables: Sequence[Table], width: int = DEFAULT_WIDTH) -> Group:
    """Title and rows of each table, then the notes of all, each note once; a title of one line
    stands on its table."""
    parts: list[RenderableType] = []
    notes: dict[str, None] = {}
    for table in tables:
        shown, dropped = fitted(table, width)
        parts += [Text(table.title), *[Text()] * ("\n" in table.title), _rich(shown, width), Text()]
        names = [column.heading.replace("\n", " ") for column in dropped if not column.explains]
        too_narrow = [f"too narrow for: {', '.join(names)}"] if names else []
        # for each row, the cells of dropped columns that explain rows
        numbers = [
            number
            for number, column in enumerate(table.columns)
            if column in dropped and column.explains
        ]
        explanations = [
            f"{row[0].text}: {row[number].text}" for number in numbers for row in table.rows
        ]
        notes |= dict.fromkeys([*table.notes, *too_narrow, *explanations])
    return Group(*parts, Text("\n".join(notes), style="dim"))


def as_text(tables: Sequence[Table], width: int = DEFAULT_WIDTH) -> str:
    """The tables as plain text, no line longer than `width`."""
    stream = io.StringIO()
    console = Console(
        file=stream, width=width, color_system=None, force_terminal=False, legacy_windows=False
    )
    console.print(as_renderable(tables, width))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def print_tables(tables: Sequence[Table], console: Console) -> None:
    """Print the tables at the width of the terminal or COLUMNS, and with all columns to a file or a
    pipe."""
    if not console.is_terminal and "COLUMNS" not in os.environ:
        shown = [table.shown() for table in tables]
        widths = (sum(_widths(table)) + _GAP * (len(table.columns) - 1) for table in shown)
        console.width = max(console.width, *widths)
    console.print(as_renderable(tables, console.width))


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
        [*column.heading.split("\n"), *(row[n].text for row in table.rows)]
        for n, column in enumerate(table.columns)
    ]
    return [max(map(len, lines)) for lines in texts]


def _rich(table: Table, width: int) -> RichTable:
    rich = RichTable(box=SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), pad_edge=False, show_edge=False)
    available = width - sum(_GAP + column_width for column_width in _widths(table)[1:])
    for number, column in enumerate(table.columns):
        if number == 0:
            name_width = max(min(_widths(table)[0], available), _SHORTEST_NAME)
            rich.add_column(
                column.heading,
                no_wrap=True,
                overflow="ellipsis",
                max_width=name_width,
                style="bold",
            )
        else:
            rich.add_column(
                column.heading, justify="left" if column.left else "right", no_wrap=True
            )
    for row in table.rows:
        rich.add_row(*(Text(cell.text) for cell in row))
    return rich


# ------------------------------------------------------------------------------
# A study, a sweep or a comparison as one HTML file that needs no other file and no network.
# ------------------------------------------------------------------------------

NAME = "report.html"
_TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Page:
    """Content of `report.html`.

    about    lines under the title that describe the run
    caveats  limits of the numbers, for their readers
    failed   one sentence for each arm or point that failed
    tables   tables without a visible column are omitted
    figures  PNG files
    config   the settings, as text
    facts    provenance: commit, machine, versions
    """

    title: str
    tables: Sequence[Table]
    about: Sequence[str] = ()
    caveats: Sequence[str] = ()
    failed: Sequence[str] = ()
    figures: Sequence[Path] = ()
    config: str = ""
    facts: Mapping[str, str] | None = None


def facts_of(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return commit, machine, versions and wall time of a summary as text."""
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    return {
        "commit": summary["commit"],
        "machine": summary["machine"],
        "versions": versions,
        "wall time": f"{summary['wall_s']:.1f} s",
    }


def write_page(page: Page, folder: Path) -> Path:
    """Write `report.html` into `folder` and return its path."""
    from jinja2 import Environment  # slow to import: a tenth of a second
    from markupsafe import Markup

    template = Environment(autoescape=True, trim_blocks=True).from_string(_TEMPLATE.read_text())
    path = folder / NAME
    figures = [
        {"name": path.stem, "data": base64.b64encode(path.read_bytes()).decode()}
        for path in page.figures
    ]
    tables = []
    for table in page.tables:
        if table.shown().columns:
            heading, *lines = table.title.split("\n")
            shown = {"heading": heading, "lines": lines, "html": Markup(html(table))}
            tables.append({"name": table.name, "notes": table.notes, **shown})
    path.write_text(template.render(page=page, tables=tables, figures=figures))
    return path

"""All renderings of a table show the same cells."""

import csv
import io
from html.parser import HTMLParser

import pytest
from rich.console import Console

from spanlab.report.table import (
    MISSING,
    Cell,
    Column,
    Table,
    as_text,
    csv_text,
    fitted,
    html,
    markdown,
    print_tables,
    read,
    tracker_rows,
    write,
)

COLUMNS = (
    Column("arm", "arm", left=True),
    Column("ttft_mean_s", "TTFT\nmean", keep=0),
    Column("ttft_mean_low_s", ""),
    Column("steady", "steady\nstate", keep=2),
    Column("requests", "requests", keep=1),
)
ROWS = (
    (Cell("a|<b>", "a|<b>"), Cell(0.4125, "412 ms"), Cell(0.4, ""), Cell(True, "yes"), Cell(1200, "1,200")),
    (Cell("[red]", "[red]"), MISSING, Cell(None, ""), Cell(False, "no"), Cell(3, "3")),
)
TABLE = Table("arms", "toy\nfooter", COLUMNS, ROWS, ("a note", "another"))


class Cells(HTMLParser):
    """The cells of an HTML table: text and sort key."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[list[str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag in ("td", "th"):
            self.cells.append(["", dict(attrs).get("data-value")])

    def handle_data(self, data):
        if self.cells and data.strip():
            self.cells[-1][0] += data


def test_markdown_aligns_numbers_and_escapes_bars():
    assert markdown(TABLE).splitlines() == [
        "| arm | TTFT mean | steady state | requests |",
        "| --- | ---: | ---: | ---: |",
        "| `a\\|<b>` | 412 ms | yes | 1,200 |",
        "| `[red]` | – | no | 3 |",
    ]


def test_markdown_headings_escape_bars():
    table = Table("errors", "errors", (Column("p50", "median\n|error|"),), ((Cell(0.1, "10 %"),),), ())
    assert markdown(table).splitlines()[0] == "| median \\|error\\| |"


def test_csv_has_every_value_with_its_unit(tmp_path):
    write([TABLE], tmp_path)
    (path,) = tmp_path.glob("tables/*")
    assert path.name == "arms.csv"
    assert path.read_text() == csv_text(TABLE)
    with path.open(newline="") as file:
        records = list(csv.reader(file))
    assert records == [
        ["arm", "ttft_mean_s", "ttft_mean_low_s", "steady", "requests"],
        ["a|<b>", "0.4125", "0.4", "True", "1200"],
        ["[red]", "", "", "False", "3"],
    ]


def test_stored_tables_come_back_equal(tmp_path):
    empty = Table("none", "nothing", COLUMNS, ())
    write([TABLE, empty], tmp_path)
    assert read(tmp_path) == {"arms": TABLE, "none": empty}


def test_html_escapes_text_and_carries_sort_keys():
    text = html(TABLE)
    assert "<b>" not in text
    assert Cells(text).cells == [
        ["arm", None],
        ["TTFTmean", None],
        ["steadystate", None],
        ["requests", None],
        ["a|<b>", "a|<b>"],
        ["412 ms", "0.4125"],
        ["yes", "True"],
        ["1,200", "1200"],
        ["[red]", "[red]"],
        ["–", None],
        ["no", "False"],
        ["3", "3"],
    ]


def test_the_tracker_gets_values():
    names, rows = tracker_rows(TABLE)
    assert names == [column.name for column in COLUMNS]
    assert rows == [["a|<b>", 0.4125, 0.4, True, 1200], ["[red]", None, None, False, 3]]


def test_the_terminal_shows_title_rows_and_notes():
    lines = [line.split() for line in as_text([TABLE], 80).splitlines() if line.strip("─ ")]
    assert lines[:2] == [["toy"], ["footer"]]
    assert ["a|<b>", "412", "ms", "yes", "1,200"] in lines
    assert ["[red]", "–", "no", "3"] in lines
    assert lines[-2:] == [["a", "note"], ["another"]]


def test_a_narrow_terminal_drops_the_highest_keep_first():
    widths = {width: [column.name for column in fitted(TABLE, width)[0].columns] for width in (40, 30, 20, 4)}
    assert widths[40] == ["arm", "ttft_mean_s", "steady", "requests"]
    assert widths[30] == ["arm", "ttft_mean_s", "requests"]
    assert widths[20] == widths[4] == ["arm", "ttft_mean_s"]
    assert [column.heading for column in fitted(TABLE, 20)[1]] == ["steady\nstate", "requests"]
    assert as_text([TABLE], 30).splitlines()[-1] == "too narrow for: steady state"


def test_equal_notes_of_several_tables_appear_once():
    assert as_text([TABLE, TABLE], 80).count("another") == 1


def test_a_table_without_rows_has_every_rendering():
    empty = Table("none", "nothing", COLUMNS, ())
    assert csv_text(empty).count("\n") == 1
    assert "nothing" in as_text([empty])
    assert "<tbody>" in html(empty)
    assert markdown(empty).count("\n") == 2


@pytest.mark.parametrize(
    ("columns", "rows", "message"),
    [
        ((COLUMNS[0], COLUMNS[0]), (), "expected different names"),
        (COLUMNS[:2], ((MISSING,),), "cells of a row of table x=1: expected 2"),
    ],
)
def test_an_inconsistent_table_is_refused(columns, rows, message):
    with pytest.raises(ValueError, match=message):
        Table("x", "x", columns, rows)


def test_a_file_gets_all_columns_unless_columns_is_set(monkeypatch):
    def printed() -> str:
        file = io.StringIO()
        print_tables([TABLE], Console(file=file, width=20, force_terminal=False))
        return file.getvalue()

    monkeypatch.delenv("COLUMNS", raising=False)
    assert "too narrow" not in printed()
    assert "1,200" in printed()
    monkeypatch.setenv("COLUMNS", "20")
    assert "too narrow for:" in " ".join(printed().split())


def test_dropped_explanations_become_notes():
    columns = (Column("fix", "fix", left=True), Column("says", "what it is", keep=1, left=True, explains=True))
    table = Table("fixes", "fixes", columns, ((Cell(1, "block_1"), Cell(2, "blocks of one token " * 4)),))
    wide, narrow = as_text([table], 200), as_text([table], 60)
    assert "block_1: " not in wide
    assert "block_1: blocks of one token" in narrow
    assert "too narrow" not in narrow

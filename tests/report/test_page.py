"""report.html contains tables, figures, settings and provenance in one file, without external resources."""

import base64
from html.parser import HTMLParser

import pytest

from spanlab.report.table import Cell, Column, Page, Table, facts_of, html, write_page

TABLE = Table("arms", "Arms <1>\nfooter", (Column("arm", "arm", left=True),), ((Cell("a", "<a>"),),), ("a & b",))
ROWS = Table("rows", "rows", (Column("arm", ""),), ((Cell("a", ""),),))
PICTURE = b"\x89PNG picture"
FACTS = facts_of({"commit": "1a2b3c4", "machine": "2 x cpu", "versions": {"python": "3.11"}, "wall_s": 1.25})


class Reader(HTMLParser):
    """Parser for attributes that name a resource, for texts, and for unclosed tags."""

    VOID = ("meta", "img", "br", "link", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.resources: list[str] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.resources += [value for name, value in attrs if name in ("src", "href")]
        self.open += [] if tag in self.VOID else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data.strip())


@pytest.fixture
def page_text(tmp_path):
    figure = tmp_path / "pareto.png"
    figure.write_bytes(PICTURE)
    page = Page(
        "toy <x>", (TABLE, ROWS), ("about & more",), ("a caveat",), ("lost: why",), (figure,), "key: <value>\n", FACTS
    )
    path = write_page(page, tmp_path)
    assert path == tmp_path / "report.html"
    return path.read_text()


def test_the_page_names_no_external_resource(page_text):
    resources = Reader(page_text).resources
    picture = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"
    assert {name for name in resources if not name.startswith("#")} == {picture}
    assert not [word for word in ("http:", "https:", "@import", "url(", "fetch(") if word in page_text]


def test_all_content_is_present_and_escaped(page_text):
    reader = Reader(page_text)
    assert reader.open == []
    expected = {"toy <x>", "about & more", "a caveat", "lost: why", "key: <value>", "Arms <1>", "a & b", "<a>"}
    assert expected <= set(reader.texts)
    assert {"1a2b3c4", "2 x cpu", "python 3.11", "1.2 s", "pareto"} <= set(reader.texts)
    assert html(TABLE) in page_text


def test_tables_without_a_visible_column_are_omitted(page_text):
    assert 'id="arms"' in page_text
    assert 'id="rows"' not in page_text


def test_absent_content_has_no_heading(tmp_path):
    text = write_page(Page("toy", (), facts=FACTS), tmp_path).read_text()
    assert not {"caveats", "failed", "figures"} & set(Reader(text).texts)

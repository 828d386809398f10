"""A study, a sweep or a comparison as one HTML file that needs no other file and no network."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spanlab.report.faces import html
from spanlab.report.tables import Table

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

    template = Environment(autoescape=True, trim_blocks=True).from_string(_TEMPLATE.read_text())
    path = folder / NAME
    path.write_text(template.render(page=page, tables=list(_tables(page)), figures=list(_figures(page))))
    return path


def _tables(page: Page) -> Iterator[dict[str, Any]]:
    from markupsafe import Markup

    for table in page.tables:
        if table.shown().columns:
            heading, *lines = table.title.split("\n")
            shown = {"heading": heading, "lines": lines, "html": Markup(html(table))}
            yield {"name": table.name, "notes": table.notes, **shown}


def _figures(page: Page) -> Iterator[dict[str, str]]:
    for path in page.figures:
        yield {"name": path.stem, "data": base64.b64encode(path.read_bytes()).decode()}

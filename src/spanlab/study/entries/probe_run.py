"""What the entries of the probe leave in a run folder: tables, figures, report, summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import orjson
from matplotlib.figure import Figure
from rich.console import Console

from spanlab.report import faces
from spanlab.report.console import print_tables
from spanlab.report.drawing.write import write_figure
from spanlab.report.page import Page, facts_of, write_page
from spanlab.report.tables import Table
from spanlab.study.output import provenance
from spanlab.study.output.folder import RunFolder
from spanlab.study.progress import say
from spanlab.terminal import printed

FOLDER = "probe"
CAVEATS = (
    "a model of a million parameters that was trained on synthetic facts: what it shows need not hold of published "
    "weights",
)


@dataclass(frozen=True)
class Findings:
    """What a run found.

    `data`     what was asked, in words
    `model`    the model, in words
    `tables`   the first `printed` of them are for the terminal
    `figures`  functions of a footer, by name
    `caveats`  what the numbers do not say
    """

    data: str
    model: str
    seeds: Sequence[int]
    threads: int
    tables: Sequence[Table]
    printed: int
    figures: Mapping[str, Callable[[str], Figure]] = field(default_factory=dict)
    caveats: Sequence[str] = CAVEATS


def write_findings(folder: RunFolder, title: str, config: str, found: Findings, started: float) -> None:
    """Fill the folder, let it take its place, and print the tables; `started` is a time of `perf_counter`."""
    summary = {
        "workload": {"provenance": "made by this program", "detail": found.data},
        "model": found.model,
        "engine": {"device": f"cpu, {found.threads} thread{'s' if found.threads > 1 else ''}"},
        "seeds": list(found.seeds),
        "caveats": list(found.caveats),
        **provenance.run_facts(time.perf_counter() - started, provenance.PACKAGES_OF["engine"]),
    }
    (folder.work / "summary.json").write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2) + b"\n")
    faces.write(found.tables, folder.work)
    figures = _draw(found, f"{found.data} · {found.model} · commit {summary['commit']}", folder.work / "figures")
    about = (found.data, found.model)
    caveats, facts = tuple(found.caveats), facts_of(summary)
    page = Page(title, found.tables, about, caveats, figures=figures, config=config, facts=facts)
    write_page(page, folder.work)
    folder.finish()
    with printed() as console:
        print_tables(found.tables[: found.printed], console)
    say(Console(stderr=True), str(folder.path))


def _draw(found: Findings, footer: str, folder: Path) -> list[Path]:
    """Draw every figure; the PNG files."""
    files = [
        path for name, draw in found.figures.items() for path in write_figure(partial(draw, footer), folder / name)
    ]
    return [path for path in files if path.suffix == ".png"]

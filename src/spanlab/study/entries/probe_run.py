"""Run folder of the probe's entries: tables, figures, report, summary."""

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
from spanlab.study.progress import print_line
from spanlab.terminal import printed

FOLDER = "probe"
CAVEATS = (
    "a model of a million parameters that was trained on synthetic facts: what it shows need not hold of published "
    "weights",
)


@dataclass(frozen=True)
class Findings:
    """Results of a run.

    `data`     description of the data
    `model`    description of the model
    `tables`   all tables; the first `printed` tables are printed
    `figures`  functions that draw a figure with a given footer, by name
    `caveats`  limits of the numbers
    """

    data: str
    model: str
    seeds: Sequence[int]
    threads: int
    tables: Sequence[Table]
    printed: int
    figures: Mapping[str, Callable[[str], Figure]] = field(default_factory=dict)
    caveats: Sequence[str] = CAVEATS


def write_findings(folder: RunFolder, title: str, config: str, findings: Findings, started: float) -> None:
    """Write and publish the run folder, and print the tables; `started` is a time of `perf_counter`."""
    summary = {
        "workload": {"provenance": "made by this program", "detail": findings.data},
        "model": findings.model,
        "engine": {"device": f"cpu, {findings.threads} thread{'s' if findings.threads > 1 else ''}"},
        "seeds": list(findings.seeds),
        "caveats": list(findings.caveats),
        **provenance.run_facts(time.perf_counter() - started, provenance.PACKAGES_OF["engine"]),
    }
    (folder.work / "summary.json").write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2) + b"\n")
    faces.write(findings.tables, folder.work)
    figures = _draw(
        findings, f"{findings.data} · {findings.model} · commit {summary['commit']}", folder.work / "figures"
    )
    about = (findings.data, findings.model)
    caveats, facts = tuple(findings.caveats), facts_of(summary)
    page = Page(title, findings.tables, about, caveats, figures=figures, config=config, facts=facts)
    write_page(page, folder.work)
    folder.finish()
    with printed() as console:
        print_tables(findings.tables[: findings.printed], console)
    print_line(Console(stderr=True), str(folder.path))


def _draw(findings: Findings, footer: str, folder: Path) -> list[Path]:
    """Draw every figure, and return the PNG files."""
    files = [
        path for name, draw in findings.figures.items() for path in write_figure(partial(draw, footer), folder / name)
    ]
    return [path for path in files if path.suffix == ".png"]

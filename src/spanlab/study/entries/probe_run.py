"""Run folder of the probe's entries: tables, figures, report, summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from spanlab.report.cells import Table
from spanlab.report.table import Page, facts_of, write_page
from spanlab.settings.probe import HybridAnswers, TrainProbe
from spanlab.settings.tail_replay import TailReplay
from spanlab.study.folder import CONFIG, PACKAGES_OF, RunFolder, draw_figures, publish, run_facts, write_results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    tables: Sequence[Table]
    printed: int
    figures: Mapping[str, Callable[[str], Figure]] = field(default_factory=dict)
    caveats: Sequence[str] = CAVEATS


def write_findings(
    folder: RunFolder,
    title: str,
    settings: TrainProbe | HybridAnswers | TailReplay,
    findings: Findings,
    started: float,
) -> None:
    """Write and publish the run folder, and print the tables; `started` is a time of `perf_counter`."""
    summary = {
        "workload": {"provenance": "made by this program", "detail": findings.data},
        "model": findings.model,
        "engine": {"device": f"cpu, {settings.threads} thread{'s' if settings.threads > 1 else ''}"},
        "seeds": [settings.seed],
        "caveats": list(findings.caveats),
        **run_facts(time.perf_counter() - started, PACKAGES_OF["engine"]),
    }
    write_results(summary, findings.tables, folder.work)
    footer = f"{findings.data} · {findings.model} · commit {summary['commit']}"
    draws = {name: partial(draw, footer) for name, draw in findings.figures.items() if settings.output.figures}
    page = Page(
        title,
        findings.tables,
        about=(findings.data, findings.model),
        caveats=tuple(findings.caveats),
        figures=draw_figures(draws, folder.work / "figures"),
        config=(folder.work / CONFIG).read_text(),
        facts=facts_of(summary),
    )
    write_page(page, folder.work)
    publish(folder, findings.tables[: findings.printed])

"""The entry `compare`: finished runs beside the first of them, arm by arm."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from spanlab.analysis.differences import differences
from spanlab.analysis.pairs import UnpairedError, paired
from spanlab.analysis.settings_difference import differing
from spanlab.report import faces
from spanlab.report.console import print_tables
from spanlab.report.page import Page, facts_of, write_page
from spanlab.report.runs_table import ArmRow, arms_table, settings_table
from spanlab.report.tables import Table
from spanlab.settings import Compare
from spanlab.study.entries.compare_serving import compare_serving
from spanlab.study.entries.finished_runs import FinishedRun, finished_runs
from spanlab.study.output import provenance
from spanlab.study.output.config import settings_yaml
from spanlab.study.output.folder import RunFolder
from spanlab.study.progress import say
from spanlab.terminal import printed

FOLDER = "compare"


def run_compare(settings: Compare, run: str, root: Path) -> Path:
    """Compare runs, print the tables, leave a folder; returns the folder."""
    started = time.perf_counter()
    runs = finished_runs(settings.runs)
    config = settings_yaml(asdict(settings))
    with RunFolder(root, FOLDER, run, settings.output.if_exists, config) as folder:
        tables = compare(runs)
        summary = {
            "compared": [
                {"name": one.name, "folder": str(one.folder), "commit": one.summary["commit"]} for one in runs
            ],
            **provenance.run_facts(time.perf_counter() - started),
        }
        (folder.work / "summary.json").write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2) + b"\n")
        faces.write(tables, folder.work)
        write_page(_page(runs, tables, config, summary), folder.work)
        folder.finish()
    with printed() as console:
        print_tables(tables, console)
    say(Console(stderr=True), str(folder.path))
    return folder.path


def compare(runs: Sequence[FinishedRun]) -> tuple[Table, ...]:
    """Arms, metrics of serving and settings of each run beside the first, as far as all runs have them."""
    names = [one.name for one in runs]
    found = [_arms(runs)] if all("arms" in one.summary for one in runs) else []
    found += [compare_serving(runs)] if all(one.serving for one in runs) else []
    if not found:
        raise ValueError(f"runs={names}: expected an analysis that all of them have, summary or serving")
    return *found, settings_table(names, differing([one.settings for one in runs]))


def _arms(runs: Sequence[FinishedRun]) -> Table:
    first, *others = runs
    rows = [
        _row(first, other, arm) for other in others for arm in first.summary["arms"] if arm in other.summary["arms"]
    ]
    if not rows:
        raise ValueError(f"runs={[one.name for one in runs]}: expected an arm that two runs share")
    title = f"{' and '.join(other.name for other in others)} beside {first.name}"
    return arms_table(title, rows, several=len(others) > 1, notes=_only(runs))


def _row(first: FinishedRun, other: FinishedRun, arm: str) -> ArmRow:
    both = [one.summary["arms"][arm] for one in (first, other)]
    hits = (both[0]["token_hit_rate"], both[1]["token_hit_rate"])
    ttft_s = (both[0]["ttft_s"]["mean"], both[1]["ttft_s"]["mean"])
    try:
        pairs = paired(first.records(arm), other.records(arm))
    except UnpairedError as reason:
        return ArmRow(arm, other.name, hits, ttft_s, None, str(reason))
    found = differences(pairs, first.saturated(arm) or other.saturated(arm))
    return ArmRow(arm, other.name, hits, ttft_s, found)


def _only(runs: Sequence[FinishedRun]) -> list[str]:
    """Arms that not every run has."""
    arms = [set(one.summary["arms"]) for one in runs]
    left = {one.name: sorted(own - set.intersection(*arms)) for one, own in zip(runs, arms, strict=True)}
    return [f"not in every run, {name}: {', '.join(names)}" for name, names in left.items() if names]


def _page(runs: Sequence[FinishedRun], tables: Sequence[Table], config: str, summary: dict[str, Any]) -> Page:
    caveats = dict.fromkeys(f"{one.name}: {words}" for one in runs for words in one.summary["caveats"])
    failed = [f"{one.name}: {words}" for one in runs for words in one.summary["failed"].values()]
    about = [f"{one.name}: {one.summary['workload']['detail']}, {one.summary['model']}" for one in runs]
    return Page(tables[0].title, tables, about, tuple(caveats), failed, config=config, facts=facts_of(summary))

"""The entry `compare`: compare finished runs with the first one, arm by arm."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spanlab.analysis.bootstrap import describe_few
from spanlab.analysis.differences import differences
from spanlab.analysis.pairs import UnpairedError, paired
from spanlab.analysis.settings_difference import differing
from spanlab.report.page import Page, facts_of, write_page
from spanlab.report.runs_table import ArmRow, arms_table, settings_table
from spanlab.report.tables import Table
from spanlab.settings import Compare
from spanlab.study.entries.compare_serving import compare_serving
from spanlab.study.entries.finished_runs import FinishedRun, finished_runs
from spanlab.study.output import provenance
from spanlab.study.output.folder import CONFIG
from spanlab.study.output.results import entry_folder, publish, write_results

FOLDER = "compare"


def run_compare(settings: Compare, run: str, root: Path) -> Path:
    """Compare runs, print the tables, write a run folder, and return the folder."""
    started = time.perf_counter()
    runs = finished_runs(settings.runs)
    with entry_folder(settings, FOLDER, run, root) as folder:
        tables = compare(runs)
        summary = {
            "compared": [
                {"name": other.name, "folder": str(other.folder), "commit": other.summary["commit"]} for other in runs
            ],
            **provenance.run_facts(time.perf_counter() - started),
        }
        write_results(summary, tables, folder.work)
        write_page(_page(runs, tables, summary, folder.work), folder.work)
        publish(folder, tables)
    return folder.path


def compare(runs: Sequence[FinishedRun]) -> tuple[Table, ...]:
    """Tables of arms, serving metrics and settings of each run next to the first, where all runs have them."""
    names = [run.name for run in runs]
    tables = [_arms(runs)] if all("arms" in run.summary for run in runs) else []
    tables += [compare_serving(runs)] if all(run.serving for run in runs) else []
    if not tables:
        raise ValueError(f"runs={names}: expected an analysis that all of them have, summary or serving")
    return *tables, settings_table(names, differing([run.settings for run in runs]))


def _arms(runs: Sequence[FinishedRun]) -> Table:
    first, *others = runs
    rows = [
        _row(first, other, arm) for other in others for arm in first.summary["arms"] if arm in other.summary["arms"]
    ]
    if not rows:
        raise ValueError(f"runs={[run.name for run in runs]}: expected an arm that two runs share")
    title = f"{' and '.join(other.name for other in others)} beside {first.name}"
    notes = [*_few(rows), *_unshared_arms(runs)]
    return arms_table(title, rows, several=len(others) > 1, notes=notes)


def _few(rows: Sequence[ArmRow]) -> Iterator[str]:
    """Yield a note where paired requests have too few seeds or groups for an interval."""
    sizes = dict.fromkeys((row.differences.seeds, row.differences.groups) for row in rows if row.differences)
    yield from filter(None, (describe_few(*size) for size in sizes))


def _row(first: FinishedRun, other: FinishedRun, arm: str) -> ArmRow:
    summaries = [run.summary["arms"][arm] for run in (first, other)]
    hits = (summaries[0]["token_hit_rate"], summaries[1]["token_hit_rate"])
    ttft_s = (summaries[0]["ttft_s"]["mean"], summaries[1]["ttft_s"]["mean"])
    try:
        pairs = paired(first.records(arm), other.records(arm))
    except UnpairedError as reason:
        return ArmRow(arm, other.name, hits, ttft_s, None, str(reason))
    saturated = first.saturated(arm), other.saturated(arm)
    arm_differences = differences(pairs, any(saturated))
    means_s = zip(arm_differences.ttft_means_s, saturated, strict=True)
    first_s, other_s = (None if grows else mean_s for mean_s, grows in means_s)
    return ArmRow(arm, other.name, arm_differences.hit_rates, (first_s, other_s), arm_differences)


def _unshared_arms(runs: Sequence[FinishedRun]) -> list[str]:
    """Notes on arms that some runs lack."""
    arms = [set(run.summary["arms"]) for run in runs]
    unshared = {run.name: sorted(run_arms - set.intersection(*arms)) for run, run_arms in zip(runs, arms, strict=True)}
    return [f"not in every run, {name}: {', '.join(names)}" for name, names in unshared.items() if names]


def _page(runs: Sequence[FinishedRun], tables: Sequence[Table], summary: dict[str, Any], folder: Path) -> Page:
    caveats = dict.fromkeys(f"{run.name}: {text}" for run in runs for text in run.summary["caveats"])
    failed = [f"{run.name}: {text}" for run in runs for text in run.summary["failed"].values()]
    about = [f"{run.name}: {run.summary['workload']['detail']}, {run.summary['model']}" for run in runs]
    config = (folder / CONFIG).read_text()
    return Page(tables[0].title, tables, about, tuple(caveats), failed, config=config, facts=facts_of(summary))

"""The entry `compare`: finished runs beside the first of them, arm by arm."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
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
from spanlab.steady import SATURATED
from spanlab.study.entries.compare_serving import compare_serving
from spanlab.study.numbers import summary as sums
from spanlab.study.output import provenance
from spanlab.study.output.config import read_settings, settings_yaml
from spanlab.study.output.folder import CONFIG, RunFolder
from spanlab.study.progress import say
from spanlab.terminal import printed

FOLDER = "compare"


@dataclass(frozen=True)
class FinishedRun:
    """A finished study: where it is, and its name in this comparison."""

    folder: Path
    name: str

    @cached_property
    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds."""
        found: dict[str, Any] = orjson.loads((self.folder / "summary.json").read_bytes())
        return found

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings, fingerprint of the requests, and what the run was made with."""
        made = {name: self.summary[name] for name in ("commit", "machine")}
        return read_settings((self.folder / CONFIG).read_text()) | made

    def records(self, arm: str) -> sums.Columns:
        """An arm's records at the study's own load."""
        path = self.folder / "records" / f"{arm}.jsonl"
        try:
            columns = sums.read_records(path)
        except (ValueError, OSError) as error:
            raise ValueError(f"{path}: expected records of this version: {error}") from error
        kept = sums.at_rate(columns, self.settings["arrivals"]["rate_rps"])
        seeds = self.summary["arms"][arm]["seeds"] if "arms" in self.summary else self.summary["seeds"]
        return sums.select(columns, kept & np.isin(columns["seed"], seeds))

    @cached_property
    def serving(self) -> dict[str, dict[str, Any]]:
        """Metrics of serving of each arm at the study's own load; empty where it was not asked for them."""
        rate = self.settings["arrivals"]["rate_rps"]
        rows = self.summary.get("serving", ())
        return {row["arm"]: row["metrics"] for row in rows if row["rate_rps"] == rate}

    def saturated(self, arm: str) -> bool:
        """Whether the arm's queue grows."""
        return bool(self.summary["arms"][arm]["stationarity"]["verdict"] == SATURATED)


def run_compare(settings: Compare, run: str, root: Path) -> Path:
    """Compare runs, print the tables, leave a folder; returns the folder."""
    started = time.perf_counter()
    runs = _finished(settings.runs)
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


def _finished(given: Sequence[str]) -> list[FinishedRun]:
    """The runs by folder; names are those of the folders, or their whole paths where these are equal."""
    folders = [Path(text) for text in given]
    counts = Counter(folder.resolve().name for folder in folders)
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(f"runs={given}: expected different runs")
    found = []
    for folder in folders:
        if not (folder / "summary.json").is_file():
            raise ValueError(f"runs={folder}: expected the folder of a finished run")
        own = FinishedRun(folder, str(folder) if counts[folder.resolve().name] > 1 else folder.resolve().name)
        if "arms" not in own.summary and not own.serving:
            raise ValueError(f"runs={folder}: expected a study; compare the points of a sweep one by one")
        found.append(own)
    return found


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

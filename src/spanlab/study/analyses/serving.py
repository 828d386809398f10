"""The analysis `serving`: delays, rates, goodput and queues of every arm, by the names of vLLM's benchmark."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from spanlab.analysis.serving import Gaps, Goal, Queues, Values, queues, serving_values
from spanlab.report.analyses.serving import ServingRow, serving_table
from spanlab.report.figures.queues_over_time import draw as draw_queues_over_time
from spanlab.settings import Study
from spanlab.settings.analyses import ANALYSES
from spanlab.stats import Interval, t_interval
from spanlab.study.analyses.head import footer
from spanlab.study.execution.cells import cells
from spanlab.study.findings import Findings, Finished
from spanlab.study.numbers import summary as sums
from spanlab.study.numbers.results import family
from spanlab.study.output.arm_files import ArmFiles, Cell

_OF_RUN = ("preemptions", "kv_resident_mean_bytes")


@dataclass(frozen=True)
class _Arm:
    """Results of an arm at one load: metrics over its runs, and the queues of the first run."""

    row: ServingRow
    queues: Queues
    notes: tuple[str, ...]


@ANALYSES.register("serving")
def serving(finished: Finished) -> Findings:
    """Return metrics of every arm at every load; intervals are over seeds."""
    study = finished.study
    goals = {name: _goal(vars(limits)) for name, limits in study.goodput.items()}
    arms = [arm for name, files in finished.files.items() for arm in _loads(study, name, files, goals)]
    rows = [arm.row for arm in arms]
    title = f"{finished.name} · serving\n{footer(finished)}"
    caveats = (*_warm(study), *dict.fromkeys(note for arm in arms for note in arm.notes))
    queues_by_arm = {arm.row.arm: arm.queues for arm in arms if arm.row.rate_rps == study.arrivals.rate_rps}
    families = {name: family(study.arms[name]) for name in queues_by_arm}
    return Findings(
        summary={"serving": [row.summary() for row in rows]},
        tables=(serving_table(title, rows, tuple(goals), caveats),),
        figures={"queues_over_time": partial(draw_queues_over_time, queues_by_arm, families, footer(finished))},
        caveats=caveats,
    )


def _warm(study: Study) -> tuple[str, ...]:
    """Return a caveat where runs on a real server start with the cache of earlier runs."""
    runs = sum(len(cells(study, arm)) for arm in study.chosen())
    if study.base_url is None or runs == 1 or study.replay.reset_path is not None:
        return ()
    return ("the server's cache stayed warm from run to run; replay.reset_path=PATH empties it before each",)


def _goal(limits: Mapping[str, float | None]) -> Goal:
    return Goal(**{name: math.inf if limit is None else limit for name, limit in limits.items()})


def _loads(study: Study, arm: str, files: ArmFiles, goals: Mapping[str, Goal]) -> list[_Arm]:
    """Return one arm at each of its rates, with all repeats and seeds of a rate together."""
    all_cells, columns = cells(study, arm), files.columns()
    rows = {Cell.of(row): row for row in files.finished()}
    arms = []
    for rate in dict.fromkeys(cell.rate_rps for cell in all_cells):
        rate_cells = [cell for cell in all_cells if cell.rate_rps == rate]
        runs = [_values(columns[cell], rows[cell], _tokens(files, arm, cell), goals) for cell in rate_cells]
        row = ServingRow(arm, rate, len({cell.seed for cell in rate_cells}), _over_runs(runs))
        notes = [note for cell in rate_cells for note in _notes(arm, rows[cell], _tokens(files, arm, cell))]
        arms.append(_Arm(row, queues(columns[rate_cells[0]]), tuple(notes)))
    return arms


def _tokens(files: ArmFiles, arm: str, cell: Cell) -> dict[str, Any]:
    """Return the serving log of a run; empty where an earlier run of the study did not record one."""
    path = files.serving(arm, cell)
    if not path.exists():
        return {}
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def _values(columns: sums.Columns, run: dict[str, Any], tokens: dict[str, Any], goals: Mapping[str, Goal]) -> Values:
    """Return the metrics of one run."""
    counted = sums.select(columns, columns["counted"].astype(bool))
    gaps = Gaps(tokens["gap_ns"], tokens["gap_count"]) if tokens else None
    values = serving_values(counted, gaps, goals) | queues(columns).values()
    values |= {name: float(tokens[name]) for name in ("batch_size", "batch_tokens") if name in tokens}
    values |= {name: float(run[name]) for name in _OF_RUN if name in run}
    if "failures" in run:
        values["failed"] = len(run["failures"])
    if "busy_s" in run:
        values["busy_fraction"] = sums.busy_fraction([run])
    return values


def _over_runs(runs: list[Values]) -> dict[str, Interval]:
    """Return mean and interval of each metric that all runs have.

    Student's interval is not cut: a lower end below zero shows that the runs hardly determine the metric.
    """
    names = [name for name in runs[0] if all(name in run for run in runs)]
    return {name: t_interval([run[name] for run in runs]) for name in names}


def _notes(arm: str, run: dict[str, Any], tokens: dict[str, Any]) -> list[str]:
    """Return the caveats of one run."""
    notes = (
        [] if tokens else [f"arms.{arm}: gaps between tokens were not written; output.if_exists=replace runs it again"]
    )
    if "failures" not in run:
        return notes
    notes.append(
        f"requests were sent {run['late_mean_s'] * 1e3:.3g} ms after their times on average, at most "
        f"{run['late_max_s'] * 1e3:.3g} ms: delays count from the times"
    )
    if failures := run["failures"]:
        number, first = next(iter(failures.items()))
        sent = run["requests"] + len(failures)
        notes.append(
            f"{len(failures):,} of {sent:,} requests failed and count nowhere, request {number} for this: {first}"
        )
    if run["other_lengths"]:
        notes.append(f"{run['other_lengths']:,} answers have another length than the workload's")
    return notes

"""The work of one arm: its cells one after another, each appended to the arm's files when it is done."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import IO

import orjson

from spanlab.core.batch_rules import BatchRules
from spanlab.records import Record
from spanlab.settings import Study
from spanlab.settings.analyses import DESIGNED
from spanlab.study.execution.backends import Backend
from spanlab.study.execution.jobs import Jobs
from spanlab.study.fidelity.shapes import shape_numbers
from spanlab.study.output.arm_files import ArmFiles, Cell


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker does at once: cells of one arm.

    `row`         where its progress is counted; several tasks may go on with one arm
    `last`        no task of this row follows
    `calibrates`  the cells are those of the study's calibration
    `rules`       limits of a step; None: the study's
    """

    row: int
    arm: str
    files: ArmFiles
    cells: tuple[Cell, ...]
    last: bool = True
    calibrates: bool = False
    rules: BatchRules | None = None


def cells(study: Study, arm: str) -> list[Cell]:
    """The runs of one arm: every seed at the study's load, then the load sweep; all of it again in each repeat.

    Those of a calibration: its shapes, by number, in each repeat.
    """
    if study.workload.kind == DESIGNED:
        return [Cell(n, None, repeat) for repeat in range(study.design.repeats) for n in shape_numbers(study, arm)]
    own = [Cell(seed, study.arrivals.rate_rps) for seed in study.seeds]
    if arm in study.load.arms:
        sweep = [Cell(seed, rate) for rate in study.load.rates_rps for seed in study.load.seeds]
        own += [cell for cell in sweep if cell not in own]
    return [Cell(cell.seed, cell.rate_rps, repeat) for repeat in range(study.repeats) for cell in own]


@dataclass(frozen=True)
class Bench:
    """What every arm of a study runs on: its jobs, and the backend that runs them."""

    jobs: Jobs
    backend: Backend


def run_arm(bench: Bench, task: Task, progress: Callable[[int], None]) -> None:
    """Run what an arm still lacks. `progress` is told how many requests have finished since the last call."""
    files = task.files
    for path in (files.records, files.runs):
        path.parent.mkdir(parents=True, exist_ok=True)
    with files.records.open("ab", buffering=1 << 20) as records, files.runs.open("ab") as runs:
        fcntl.flock(runs, fcntl.LOCK_EX)  # a worker elsewhere that is to stop may still be writing
        done = _go_on(files, records, runs)
        progress(sum(done[cell] for cell in task.cells if cell in done))
        for cell in task.cells:
            if cell not in done:
                _run_cell(bench, task, cell, records, runs, progress)


def _go_on(files: ArmFiles, records: IO[bytes], runs: IO[bytes]) -> dict[Cell, int]:
    """Cut off what follows the last finished cell; returns the requests of each finished one."""
    rows = files.finished()
    runs.truncate(files.runs.read_bytes().rfind(b"\n") + 1)
    records.truncate(rows[-1]["records_end"] if rows else 0)
    return {Cell.of(row): row["requests"] for row in rows}


def _run_cell(
    bench: Bench,
    task: Task,
    cell: Cell,
    records: IO[bytes],
    runs: IO[bytes],
    progress: Callable[[int], None],
) -> None:
    def write(record: Record) -> None:
        records.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        progress(1)

    job = bench.jobs.job(task.arm, cell, task.files, task.rules)
    row = asdict(bench.backend.run(job, write))
    if row.get("replicas") == []:
        del row["replicas"]
    if cell.repeat:
        row["repeat"] = cell.repeat
    records.flush()
    runs.write(orjson.dumps(row | {"records_end": records.tell()}) + b"\n")
    runs.flush()

"""Run the cells of one arm in order, and append each finished cell to the arm's files."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from typing import IO

import orjson

from spanlab.core.batch_rules import BatchRules
from spanlab.records import Record
from spanlab.settings import Study
from spanlab.settings.analyses import DESIGNED
from spanlab.study.execution.backend import Backend
from spanlab.study.execution.jobs import Jobs
from spanlab.study.fidelity.shapes import shape_numbers
from spanlab.study.output.arm_files import ArmFiles, Cell


@dataclass(frozen=True, slots=True)
class Task:
    """Cells of one arm that a worker runs in one call.

    `row`         index of its progress count; several tasks may run cells of one row
    `last`        no task of this row follows
    `calibrates`  the cells belong to the study's calibration
    `rules`       batch limits of a step; None: those of the study
    """

    row: int
    arm: str
    files: ArmFiles
    cells: tuple[Cell, ...]
    last: bool = True
    calibrates: bool = False
    rules: BatchRules | None = None


def cells(study: Study, arm: str) -> list[Cell]:
    """Return the runs of one arm: every seed at the study's load, then the load sweep, for each repeat.

    For a calibration: the numbers of its shapes, for each repeat.
    """
    if study.workload.kind == DESIGNED:
        return [Cell(n, None, repeat) for repeat in range(study.design.repeats) for n in shape_numbers(study, arm)]
    base = [Cell(seed, study.arrivals.rate_rps) for seed in study.seeds]
    if arm in study.load.arms:
        sweep = [Cell(seed, rate) for rate in study.load.rates_rps for seed in study.load.seeds]
        base += [cell for cell in sweep if cell not in base]
    return [Cell(cell.seed, cell.rate_rps, repeat) for repeat in range(study.repeats) for cell in base]


@dataclass(frozen=True)
class Runtime:
    """Jobs of a study and the backend that runs them; all arms share them."""

    jobs: Jobs
    backend: Backend


def run_arm(runtime: Runtime, task: Task, progress: Callable[[int], None]) -> Generator[None, None, None]:
    """Run the unfinished cells of a task, and yield at their pauses.

    `progress`  gets the number of requests finished since the last call
    """
    files = task.files
    for path in (files.records, files.runs):
        path.parent.mkdir(parents=True, exist_ok=True)
    with files.records.open("ab", buffering=1 << 20) as records, files.runs.open("ab") as runs:
        fcntl.flock(runs, fcntl.LOCK_EX)  # a cancelled worker on another machine may still be writing
        finished = _truncate_unfinished(files, records, runs)
        progress(sum(finished[cell] for cell in task.cells if cell in finished))
        for cell in task.cells:
            if cell not in finished:
                yield from _run_cell(runtime, task, cell, records, runs, progress)


def _truncate_unfinished(files: ArmFiles, records: IO[bytes], runs: IO[bytes]) -> dict[Cell, int]:
    """Truncate the files after the last finished cell; return the number of requests of each finished cell."""
    rows = files.finished()
    runs.truncate(files.runs.read_bytes().rfind(b"\n") + 1)
    records.truncate(rows[-1]["records_end"] if rows else 0)
    return {Cell.of(row): row["requests"] for row in rows}


def _run_cell(
    runtime: Runtime,
    task: Task,
    cell: Cell,
    records: IO[bytes],
    runs: IO[bytes],
    progress: Callable[[int], None],
) -> Generator[None, None, None]:
    def write(record: Record) -> None:
        records.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        progress(1)

    job = runtime.jobs.job(task.arm, cell, task.files, task.rules)
    row = asdict((yield from runtime.backend.run(job, write)))
    if row.get("replicas") == []:
        del row["replicas"]
    if cell.repeat:
        row["repeat"] = cell.repeat
    records.flush()
    runs.write(orjson.dumps(row | {"records_end": records.tell()}) + b"\n")
    runs.flush()

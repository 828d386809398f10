"""The work of one arm: its seeds and loads one after another, each appended to the arm's files when it is done."""

from __future__ import annotations

import fcntl
import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import orjson

from spanlab import build
from spanlab.core.request import Request
from spanlab.records import Record
from spanlab.settings import EngineSettings, Study
from spanlab.study.arm_files import ArmFiles, Cell
from spanlab.study.backends import BACKENDS, Backend, Job


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker does at once: runs of one arm until `stop` of its cells are there; None is all of them.

    `row`  where its progress is counted; several tasks may go on with one arm
    """

    row: int
    arm: str
    files: ArmFiles
    stop: int | None = None


def cells(study: Study, arm: str) -> list[Cell]:
    """The runs of one arm: every seed at the study's load, then the load sweep."""
    own = [Cell(seed, study.arrivals.rate_rps) for seed in study.seeds]
    if arm not in study.load.arms:
        return own
    sweep = [Cell(seed, rate) for rate in study.load.rates_rps for seed in study.load.seeds]
    return own + [cell for cell in sweep if cell not in own]


@dataclass(frozen=True)
class Bench:
    """What every arm of a study runs on: the same backend and requests, and per cell the same arrivals."""

    study: Study
    requests: tuple[Request, ...]
    arrivals: Callable[[Cell], list[Request]]
    backend: Backend

    @staticmethod
    def of(study: Study, requests: tuple[Request, ...]) -> Bench:
        """A bench that draws each cell's arrivals once."""

        @functools.cache
        def arrivals(cell: Cell) -> list[Request]:
            return build.build_arrivals(study, requests, cell.seed, cell.rate_rps)

        return Bench(study, requests, arrivals, BACKENDS[study.backend](study))


def run_arm(bench: Bench, task: Task, progress: Callable[[int], None]) -> None:
    """Run what an arm still lacks. `progress` is told how many requests have finished since the last call."""
    arm, files = task.arm, task.files
    todo = cells(bench.study, arm)[: task.stop]
    for path in (files.records, files.runs):
        path.parent.mkdir(parents=True, exist_ok=True)
    with files.records.open("ab", buffering=1 << 20) as records, files.runs.open("ab") as runs:
        fcntl.flock(runs, fcntl.LOCK_EX)  # a worker elsewhere that is to stop may still be writing
        done = _go_on(files, records, runs)
        progress(sum(done[cell] for cell in todo if cell in done))
        for cell in todo:
            if cell not in done:
                _run_cell(bench, arm, cell, files, records, runs, progress)


def _outputs(engine: EngineSettings, arm: str, cell: Cell, files: ArmFiles) -> dict[str, Path]:
    """Where a run's outputs go, and where its teacher's are."""
    if engine.record == "nothing":
        return {}
    own = {"outputs": files.outputs(arm, cell)}
    return own if engine.teacher in (None, arm) else own | {"teacher": files.outputs(engine.teacher, cell)}


def _go_on(files: ArmFiles, records: IO[bytes], runs: IO[bytes]) -> dict[Cell, int]:
    """Cut off what follows the last finished cell; returns the requests of each finished one."""
    rows = files.finished()
    runs.truncate(files.runs.read_bytes().rfind(b"\n") + 1)
    records.truncate(rows[-1]["records_end"] if rows else 0)
    return {Cell.of(row): row["requests"] for row in rows}


def _run_cell(
    bench: Bench,
    arm: str,
    cell: Cell,
    files: ArmFiles,
    records: IO[bytes],
    runs: IO[bytes],
    progress: Callable[[int], None],
) -> None:
    study, arrived = bench.study, bench.arrivals(cell)

    def write(record: Record) -> None:
        records.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        progress(1)

    job = Job(
        strategy=study.arms[arm],
        requests=arrived,
        seed=cell.seed,
        rate_rps=cell.rate_rps,
        warmup=int(study.warmup_fraction * len(arrived)),
        max_tokens=max(request.num_tokens for request in bench.requests),
        group=bench.requests[0].group_id,
        steps=files.log(arm, cell),
        readings=files.readings,
        **_outputs(study.engine, arm, cell, files),
    )
    row = bench.backend.run(job, write)
    records.flush()
    runs.write(orjson.dumps(asdict(row) | {"records_end": records.tell()}) + b"\n")
    runs.flush()

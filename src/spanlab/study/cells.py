"""The work of one arm: its seeds and loads one after another, each appended to the arm's files when it is done.

JSON lines, not Parquet: a line is complete as soon as it is written, so a killed run keeps every finished cell and a
reader needs no footer. A line in the runs file closes a cell and says where its records end; a resumed arm cuts the
records there and goes on.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import orjson

from spanlab import build
from spanlab.core.request import Request
from spanlab.records import Record
from spanlab.settings import Study
from spanlab.study.backends import BACKENDS, Backend, Job


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: one seed at one load. `rate_rps` None: the workload brings its own times."""

    seed: int
    rate_rps: float | None


@dataclass(frozen=True, slots=True)
class ArmFiles:
    """Where one arm's records and finished runs go, the folder of its step logs, and the study's readings."""

    records: Path
    runs: Path
    steps: Path
    readings: Path

    def log(self, arm: str, cell: Cell) -> Path:
        """The step log of one run."""
        return self.steps / f"{arm}-seed{cell.seed}-rate{cell.rate_rps}.jsonl"


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
    done, offset = _finished(files)
    progress(sum(done))
    for path in (files.records, files.runs):
        path.parent.mkdir(parents=True, exist_ok=True)
    with files.records.open("ab", buffering=1 << 20) as records, files.runs.open("ab") as runs:
        records.truncate(offset)
        for cell in todo[len(done) :]:
            _run_cell(bench, arm, cell, files, records, runs, progress)


def _finished(files: ArmFiles) -> tuple[list[int], int]:
    """Requests of each finished cell, and where their records end; an unfinished last line is cut off."""
    if not files.runs.exists():
        return [], 0
    lines = files.runs.read_bytes().split(b"\n")
    os.truncate(files.runs, sum(len(line) + 1 for line in lines[:-1]))
    rows = [orjson.loads(line) for line in lines[:-1]]
    return [row["requests"] for row in rows], rows[-1]["records_end"] if rows else 0


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
    )
    row = bench.backend.run(job, write)
    records.flush()
    runs.write(orjson.dumps(asdict(row) | {"records_end": records.tell()}) + b"\n")
    runs.flush()

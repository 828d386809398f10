"""Jobs: the requests of one run with their arrival times, and the settings of the run."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

import numpy as np
import orjson

from spanlab.core.admission import BatchRules
from spanlab.core.protocol import PassageRules, StoredBytes
from spanlab.core.request import Request
from spanlab.core.step import ScheduledStep, StepResult
from spanlab.engine.settings import BASELINE, reads_baseline
from spanlab.metrics import seen_tokens
from spanlab.records import Record, RunRow, ServedRecord, ServedRun
from spanlab.settings.analyses import DESIGNED, TOKENS
from spanlab.settings.arms import Strategy
from spanlab.settings.server import LoadSweep, StoreSettings
from spanlab.settings.study import Study
from spanlab.study.logs import LastSpanTiming, ServingLog, TraceFile
from spanlab.study.numbers import ArmFiles, RunCell
from spanlab.workloads.load import WorkloadSettings
from spanlab.workloads.synthetic import DesignedShapes, Shape, design
from spanlab.workloads.workload import Provenance, Workload
from spanlab_sim.arrivals import Arrivals, AsGiven, resample
from spanlab_sim.timing import TimingModel
from spanlab_sim.timings import Roofline

# ------------------------------------------------------------------------------
# Arrivals of a study's requests.
# ------------------------------------------------------------------------------


class Traffic(Protocol):
    """The part of a study that builders of arrivals read."""

    @property
    def workload(self) -> WorkloadSettings: ...

    @property
    def arrivals(self) -> Arrivals: ...


def build_arrivals(
    study: Traffic, requests: tuple[Request, ...], seed: int, rate_rps: float | None
) -> list[Request]:
    """Return the requests with arrival times of one seed; equal seeds give equal sample paths at
    every rate."""
    if not study.arrivals.keeps_order and any(request.after for request in requests):
        requests = tuple(replace(request, after=()) for request in requests)
    popularity = study.workload.popularity
    if popularity.requests is not None:
        requests = tuple(
            resample(
                requests, popularity.requests, popularity.zipf, np.random.default_rng([seed, 1])
            )
        )
    return study.arrivals.at_rate(rate_rps).arrive(requests, np.random.default_rng([seed, 0]))


# ------------------------------------------------------------------------------
# Calibration as a study: designed shapes with the arms, the scheduler and the engine of another
# study.
# ------------------------------------------------------------------------------


def calibration_of(study: Study, requests: Sequence[Request]) -> Study:
    """Return the calibration of a study: prompts and outputs up to its longest, with an unlimited
    store."""
    limits = {
        "longest": study.analyses.compare_backends.longest
        or max(request.num_tokens for request in requests),
        "outputs": study.analyses.compare_backends.outputs
        or max(request.output_len for request in requests),
    }
    return study.changed(
        workload=DesignedShapes(),
        arrivals=AsGiven(),
        arms={name: replace(arm, passages=PassageRules()) for name, arm in study.arms.items()},
        timing=Roofline(),
        store=StoreSettings(),
        seeds=[0],
        warmup_fraction=0.0,
        load=LoadSweep(),
        sweep=[],
        repeats=1,
        analyses=None,
        engine=replace(study.engine, clock="virtual", record="nothing", teacher=None),
        design=replace(study.analyses.compare_backends, **limits),
    )


def shapes_of(study: Study) -> list[Shape]:
    """Shapes of a calibration, by number."""
    arms = {name: study.arms[name].spans is not None for name in study.chosen()}
    return design(study.analyses.compare_backends, arms, study.batch, study.model.vocab_size)


def shape_numbers(study: Study, arm: str) -> range:
    """Numbers of the shapes that an arm runs."""
    arms = study.chosen()
    return range(arms.index(arm), study.analyses.compare_backends.shapes, len(arms))


def designed_workload(study: Study) -> Workload:
    """Workload with the requests of all shapes."""
    requests = [request for shape in shapes_of(study) for request in shape.requests]
    longest = max(request.num_tokens for request in requests)
    shapes = study.analyses.compare_backends.shapes
    detail = f"{shapes} designed shapes of {len(requests):,} requests, prompts of up to {longest:,} tokens"
    numbered = (replace(request, id=index) for index, request in enumerate(requests))
    return Workload("designed shapes", tuple(numbered), Provenance("modelled", detail))


@dataclass(frozen=True)
class Job:
    """One run: `requests` with their arrival times; the first `warmup` of them are not counted.

    `max_tokens`  tokens of the workload's longest prompt
    `group`       group of requests whose visits are recorded one by one
    `steps`       file of the step log, for a backend that measures steps
    `readings`    file of the machine readings before each run; None: not written
    `outputs`     file of the generated tokens; None: not written
    `serving`     file of the gaps between tokens; None: not written
    `trace`       trace file; None: not written
    `title`       name of the run in the trace file
    `teacher`     outputs of another arm's run, for teacher forcing; None: outputs of the requests,
                  or generated ones
    `logits`      file of the logits that scores are relative to; None where nothing is scored
    `reference`   whether this run writes these logits
    `clients`     maximum number of requests in flight; None: no limit
    `seen`        longest seen prefix of each request by id; None where the order of arrival follows
                  from the run
    `touched`     memory of KV and states is touched before the run, as in a store that has been
                  full once
    `plain`       the engine's model runs as transformers runs it, without a cache
    """

    strategy: Strategy
    requests: Sequence[Request]
    rules: BatchRules
    seed: int
    rate_rps: float | None
    warmup: int
    max_tokens: int
    group: int
    steps: Path
    readings: Path | None = None
    outputs: Path | None = None
    serving: Path | None = None
    trace: Path | None = None
    title: str = ""
    teacher: Path | None = None
    logits: Path | None = None
    reference: bool = False
    clients: int | None = None
    seen: Mapping[int, int] | None = None
    touched: bool = False
    plain: bool = False

    def in_plain_transformers(self) -> Job:
        """Return this job in plain transformers, which records times alone."""
        without = Strategy(family="none", keep=False)
        return replace(
            self, strategy=without, outputs=None, teacher=None, logits=None, trace=None, plain=True
        )


class Jobs:
    """Jobs of one study over one workload; arrivals of each cell, and their seen prefixes, are
    generated once."""

    def __init__(self, study: Study, requests: tuple[Request, ...]) -> None:
        self.study, self.requests = study, requests
        self.arrivals = cache(
            lambda cell: build_arrivals(study, requests, cell.seed, cell.rate_rps)
        )
        self._seen = cache(self._find_seen)

    def job(self, arm: str, cell: RunCell, files: ArmFiles, rules: BatchRules | None = None) -> Job:
        """Return the job of one cell, with `rules` or the study's batch limits; in a calibration,
        `cell.seed` is the number of the shape."""
        study, designed = self.study, self.study.workload.kind == DESIGNED
        shape = self._shapes[cell.seed] if designed else None
        requests = list(shape.requests) if shape else self.arrivals(cell.first_repeat)
        engine = study.engine
        base = study.runs.baseline
        records = engine.record != "nothing"
        has_teacher = engine.teacher == BASELINE and arm != base
        # of one run, for a trace is large
        traced = study.output.trace and cell == RunCell(
            study.runs.seeds[0], study.arrivals.rate_rps
        )
        return Job(
            strategy=study.arms[arm],
            requests=requests,
            rules=shape.rules if shape else rules or study.batch,
            seed=cell.seed,
            rate_rps=cell.rate_rps,
            warmup=int(study.runs.warmup_fraction * len(requests)),
            max_tokens=max(
                request.num_tokens for request in (requests if designed else self.requests)
            ),
            group=self.requests[0].group_id,
            steps=files.log(arm, cell),
            readings=files.readings,
            outputs=files.outputs(arm, cell) if records else None,
            serving=files.serving(arm, cell) if study.needs(TOKENS) else None,
            trace=files.trace(arm, cell) if traced else None,
            title=f"{arm}, {cell.name}",
            teacher=files.outputs(base, cell) if has_teacher else None,
            logits=files.logits(base, cell) if engine.record == "scores" else None,
            reference=arm == base and files.arm_logs is None,
            clients=study.arrivals.clients,
            seen=None if shape else self._seen(cell.first_repeat),
            touched=designed,
        )

    @cached_property
    def _shapes(self) -> list[Shape]:
        return shapes_of(self.study)

    def _find_seen(self, cell: RunCell) -> dict[int, int] | None:
        requests = self.arrivals(cell)
        if self.study.arrivals.clients is not None or any(request.after for request in requests):
            return None  # the order of arrival follows from the run
        return seen_tokens(requests)


# ------------------------------------------------------------------------------
# What every backend of a study does.
# ------------------------------------------------------------------------------

#: A run in progress, which yields at its pauses: times when it serves no request, so that another
#: may run.
Running = Generator[None, None, RunRow | ServedRun]


class Backend:
    """Runs jobs of one study; expensive objects, such as a model, may be reused from one job to the
    next.

    `interleaved`  times are measured: runs of the arms are interleaved, and the baseline runs twice
                   in each round
    """

    interleaved = False

    def __init__(self, study: Study) -> None:
        self._study = study

    def run(self, job: Job, write: Callable[[Any], None]) -> Running:
        """Run a job and return its row; `write` gets the record of each request: Record, or
        ServedRecord."""
        raise NotImplementedError  # every backend has its own

    def served(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Return the requests with the token ids that runs use."""
        return requests

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Serve a few requests with every arm before the first measurement, where times are
        measured."""

    def recover(self) -> None:
        """Release the memory of a run that ran out of memory."""

    def close(self) -> None:
        """End what it has started, after the last run."""


# ------------------------------------------------------------------------------
# Run the cells of one arm in order, and append each finished cell to the arm's files.
# ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """Cells of one arm that a worker runs in one call.

    `row`         index of its progress count; several tasks may run cells of one row
    `last`        no task of this row follows
    `calibrates`  the cells belong to the study's calibration
    `rules`       batch limits of a step; None: those of the study
    `plain`       the cells run in plain transformers
    """

    row: int
    arm: str
    files: ArmFiles
    cells: tuple[RunCell, ...]
    last: bool = True
    calibrates: bool = False
    rules: BatchRules | None = None
    plain: bool = False


def run_cells(study: Study, arm: str) -> list[RunCell]:
    """Return the runs of one arm: every seed at the study's load, then the load sweep, for each
    repeat.

    For a calibration: the numbers of its shapes, for each repeat.
    """
    if study.workload.kind == DESIGNED:
        repeats, numbers = range(study.analyses.compare_backends.repeats), shape_numbers(study, arm)
        return [RunCell(number, None, repeat) for repeat in repeats for number in numbers]
    base = [RunCell(seed, study.arrivals.rate_rps) for seed in study.runs.seeds]
    if arm in study.runs.load.arms:
        sweep = [
            RunCell(seed, rate)
            for rate in study.runs.load.rates_rps
            for seed in study.runs.load.seeds
        ]
        base += [cell for cell in sweep if cell not in base]
    repeats = range(study.runs.repeats)
    return [RunCell(cell.seed, cell.rate_rps, repeat) for repeat in repeats for cell in base]


@dataclass(frozen=True)
class Runtime:
    """Jobs of a study and the backend that runs them; all arms share them."""

    jobs: Jobs
    backend: Backend


def run_arm(
    runtime: Runtime, task: Task, progress: Callable[[int], None]
) -> Generator[None, None, None]:
    """Run the unfinished cells of a task, and yield at their pauses.

    `progress`  gets the number of requests finished since the last call
    """
    files = task.files
    for path in (files.records, files.runs):
        path.parent.mkdir(parents=True, exist_ok=True)
    with files.records.open("ab", buffering=1 << 20) as records, files.runs.open("ab") as runs:
        # a cancelled worker on another machine may still be writing
        fcntl.flock(runs, fcntl.LOCK_EX)
        rows = files.finished()
        runs.truncate(files.runs.read_bytes().rfind(b"\n") + 1)
        records.truncate(rows[-1]["records_end"] if rows else 0)
        finished = {RunCell.of(row): row["requests"] for row in rows}
        progress(sum(finished[cell] for cell in task.cells if cell in finished))
        for cell in task.cells:
            if cell not in finished:
                yield from _run_cell(runtime, task, cell, records, runs, progress)


def _run_cell(
    runtime: Runtime,
    task: Task,
    cell: RunCell,
    records: IO[bytes],
    runs: IO[bytes],
    progress: Callable[[int], None],
) -> Generator[None, None, None]:
    def write(record: Record) -> None:
        records.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        progress(1)

    job = runtime.jobs.job(task.arm, cell, task.files, task.rules)
    if task.plain:
        job = job.in_plain_transformers()
    row = asdict((yield from runtime.backend.run(job, write)))
    if row.get("replicas") == []:
        del row["replicas"]
    if cell.repeat:
        row["repeat"] = cell.repeat
    records.flush()
    runs.write(orjson.dumps(row | {"records_end": records.tell()}) + b"\n")
    runs.flush()


# ------------------------------------------------------------------------------
# Optional logs of a run, in addition to its records and its row.
# ------------------------------------------------------------------------------

OnStep = Callable[[ScheduledStep, int, StepResult], None]


class RunLogs:
    """Logs of one run; they are complete if it ends without an error.

    `store`  store whose resident bytes a trace has; None where they are unknown
    """

    def __init__(self, job: Job, store: StoredBytes | None) -> None:
        self._job = job
        self._serving = None if job.serving is None else ServingLog()
        self._trace = None if job.trace is None else TraceFile(job.trace, job.title, store)
        self._followers: list[OnStep] = [
            log.ran for log in (self._serving, self._trace) if log is not None
        ]

    def timing(self, timing: TimingModel) -> TimingModel:
        """Wrap the timing model of a run, so that the serving log reads the durations of its
        steps."""
        if self._serving is None:
            return timing
        self._serving.spans = LastSpanTiming(timing)
        return self._serving.spans

    def ran(self, step: ScheduledStep, now: int, result: StepResult) -> None:
        """Log a step; called before the scheduler advances its sequences."""
        for follow in self._followers:
            follow(step, now, result)

    def finished(self, record: Record | ServedRecord) -> None:
        """Log a record."""
        if self._serving is not None:
            self._serving.finished(record)
        if self._trace is not None:
            self._trace.finished(record)

    def __enter__(self) -> RunLogs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._serving is not None and self._job.serving is not None and error is None:
            self._serving.write(self._job.serving)
        if self._trace is not None:
            self._trace.close()


# ------------------------------------------------------------------------------
# Warm-up of an engine study: every arm serves a few requests before the first measurement.
#
# This loads code, starts thread pools, touches memory, and on a card compiles kernels and
# chooses algorithms. Without it, the first arm, usually the baseline, would include this time.
# ------------------------------------------------------------------------------

_WAVE_NS = 3_600 * 10**9  # idle time between waves, which the clock of a warm-up skips

_ROWS = (2, 4, 8, 16, 32, 64)  # more rows fill the largest tile


def warm_requests(requests: Sequence[Request]) -> list[Request]:
    """Return waves of requests: the first, shortest and longest request together, the same again,
    and short suffixes.

    The second wave reuses the stored prompts of the first. The suffixes are the last 2, 4, … tokens
    of the longest request, one prompt per wave: kernels have tiles for the number of rows that a
    prefill computes, and each size is compiled separately.
    """
    by_length = sorted(requests, key=lambda request: request.num_tokens)
    selected = list(
        {request.id: request for request in (requests[0], by_length[0], by_length[-1])}.values()
    )
    # ends of the last span alone, which do not match the start of the stored span
    *before, last = by_length[-1].spans
    sizes = [size for size in _ROWS if size < len(last.tokens)]
    ends = [replace(last, ids=last.tokens[-size:]) for size in sizes]
    suffixes = [replace(by_length[-1], spans=(*before, end), output_len=1) for end in ends]
    waves = [selected, selected, *([suffix] for suffix in suffixes)]
    numbered = [(wave, request) for wave, together in enumerate(waves) for request in together]
    return [
        replace(request, id=index, arrived_at=wave * _WAVE_NS)
        for index, (wave, request) in enumerate(numbered)
    ]


# ------------------------------------------------------------------------------
# Order of a study's runs: interleaved on the engine, with the baseline first and last in each
# round (A/A).
# ------------------------------------------------------------------------------

REPEAT_ROW = "A/A"  # name of the repeated baseline in lists of arms
CALIBRATION_PREFIX = "calibration of "


@dataclass(frozen=True)
class Row:
    """Named cells of one arm with separate files.

    `is_repeat`   the repeated baseline
    `calibrates`  the cells are calibration shapes, not the study's requests
    `rules`       batch limits of its steps; None: those of the study
    `plain`       the arm's requests run in plain transformers
    """

    name: str
    arm: str
    files: ArmFiles
    cells: tuple[RunCell, ...]
    is_repeat: bool = False
    calibrates: bool = False
    rules: BatchRules | None = None
    plain: bool = False

    def is_unfinished(self) -> bool:
        """Whether any cell is unfinished."""
        return not {RunCell.of(row) for row in self.files.finished()}.issuperset(self.cells)


def schedule_tasks(study: Study, rows: Sequence[Row]) -> list[tuple[Task, ...]]:
    """Return the tasks in order, those that alternate together: one per arm for simulations, runs
    on the engine.

    Calibration shapes run before each repeat and once after the last, so that drift affects both.
    """
    if study.backend != "engine":
        return [(_task(rows, row, row.cells),) for row in rows]
    calibrations = [row for row in rows if row.calibrates]
    arms = [row for row in rows if not row.calibrates]
    if any(row.is_repeat for row in arms):
        rounds = [interleave(study, arms)]
    else:  # arms and loads are shuffled in each repeat, so that a slow minute affects a random run
        repeats = 1 + max(cell.repeat for row in arms for cell in row.cells)
        rounds = [_shuffled(study, arms, repeat) for repeat in range(repeats)]
    if reads_baseline(study.engine):  # other arms read files of the baseline
        rounds = [
            sorted(runs, key=lambda run: run[0].name != study.runs.baseline) for runs in rounds
        ]
    single: list[Task] = []
    for repeat, runs in enumerate([*rounds, []]):
        runs = [*_shuffled(study, calibrations, repeat), *runs]
        single += [_task(rows, row, (cell,)) for row, cell in runs]
    last = {task.row: number for number, task in enumerate(single)}
    tasks = [replace(task, last=last[task.row] == number) for number, task in enumerate(single)]
    if not study.engine.alternate:
        return [(task,) for task in tasks]
    turns: dict[tuple[bool, RunCell], list[Task]] = {}  # runs of all arms on the same arrivals
    for task in tasks:
        turns.setdefault((task.calibrates, task.cells[0]), []).append(task)
    return [tuple(turn) for turn in turns.values()]


def _task(rows: Sequence[Row], row: Row, cells: tuple[RunCell, ...]) -> Task:
    number = rows.index(row)
    return Task(number, row.arm, row.files, cells, True, row.calibrates, row.rules, row.plain)


def interleave(study: Study, rows: Sequence[Row]) -> list[tuple[Row, RunCell]]:
    """Order cells in rounds: the first cell of every arm, then the second of every arm, and so on.

    Drift of the machine then affects all arms equally. The order within a round is random. The
    baseline and its repeat are first and last, and swap from round to round, so that drift favours
    neither.
    """
    (repeat,) = (row for row in rows if row.is_repeat)
    order: list[Row] = []
    for round_index in range(max(len(row.cells) for row in rows)):
        in_round = [row for row in rows if round_index < len(row.cells)]
        ends = [row for row in in_round if row.arm == repeat.arm and not row.plain]
        others = [row for row in in_round if row not in ends]
        random = np.random.default_rng([study.runs.seeds[0], round_index])
        middle = [others[index] for index in random.permutation(len(others)).tolist()]
        first, last = (ends[:1], ends[1:]) if round_index % 2 == 0 else (ends[1:], ends[:1])
        order += [*first, *middle, *last]
    remaining = {row.name: iter(row.cells) for row in rows}
    return [(row, next(remaining[row.name])) for row in order]


def _shuffled(study: Study, rows: Iterable[Row], repeat: int) -> list[tuple[Row, RunCell]]:
    pairs = [(row, cell) for row in rows for cell in row.cells if cell.repeat == repeat]
    order = np.random.default_rng([study.runs.seeds[0], repeat]).permutation(len(pairs)).tolist()
    return [pairs[index] for index in order]


def repeated_arm(study: Study) -> str:
    """The arm that runs twice: the baseline, or the first chosen arm where the baseline does not
    run."""
    chosen = study.chosen()
    return study.runs.baseline if study.runs.baseline in chosen else chosen[0]

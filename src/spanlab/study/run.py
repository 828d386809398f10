"""One study from settings to report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from rich.console import Console

from spanlab.analyses.base import Finished, Report, footer, foreign_tokenizer, head
from spanlab.analyses.fit_profile import points_of, profile_from_points
from spanlab.build import build_workload, local_profile, profile_of
from spanlab.compiled import is_used, missing
from spanlab.core.request import Request
from spanlab.provenance import PACKAGES_OF, run_facts
from spanlab.registry import fingerprints, named_errors
from spanlab.settings.analyses import ANALYSES, DESIGNED, FLOOR, PLAIN, POINTS, REPEAT
from spanlab.settings.server import LoadSweep
from spanlab.settings.study import Study, worker_count
from spanlab.study.backends import BACKENDS
from spanlab.study.bounds import (
    REMEDY,
    ArmFailure,
    ArmResult,
    raise_failures,
    raise_limit,
    raise_missed,
    raise_unequal,
)
from spanlab.study.executor import Executor
from spanlab.study.folder import (
    GROWING,
    RunFolder,
    arm_progress,
    as_yaml,
    finish_report,
    print_line,
    write_before_report,
)
from spanlab.study.jobs import (
    CALIBRATION_PREFIX,
    REPEAT_ROW,
    Row,
    Task,
    calibration_of,
    repeated_arm,
    run_cells,
    schedule_tasks,
    shapes_of,
)
from spanlab.study.machine import (
    OPTIONAL_PACKAGE,
    READINGS,
    WITHOUT_OPTIONAL,
    EngineFacts,
    engine_facts,
    floor_row,
    noise_of,
    plain_row,
    repeat_files,
)
from spanlab.study.numbers import ArmFiles
from spanlab.study.prepare import LoadFunction, check_and_load, check_context, check_device
from spanlab.study.worker import Outcomes, Worker, run_tasks, workers_of
from spanlab.workloads.workload import Workload
from spanlab_sim.arrivals import Saturating
from spanlab_sim.timings import Profile, read_profile

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# ------------------------------------------------------------------------------
# Loads as shares of the saturation rate: the rate of the baseline when all requests arrive at
# once.
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saturation:
    """Throughput of the baseline when all requests arrive at the start."""

    arm: str
    requests: int
    seconds: float
    rate_rps: float

    def shares(self, shares: Iterable[float]) -> dict[float, float]:
        """Map each rate, in requests per second, to its share."""
        return {share * self.rate_rps: share for share in shares}


def measure_saturation(
    study: Study, workload: Workload, files: ArmFiles, folder: Path, console: Console
) -> Saturation:
    """Measure the baseline's saturation rate, or read it from `files` of an interrupted run."""
    arm = study.runs.baseline
    if not files.finished():
        at_once = study.changed(
            arrivals=Saturating(order=study.arrivals.order),
            load=LoadSweep(),
            repeats=1,
            analyses=["compare_backends"],
            engine=replace(study.engine, record="nothing", teacher=None),
        )
        task = Task(0, arm, files, tuple(run_cells(at_once, arm)))
        with workers_of(at_once, workload.requests, 1, 1, folder) as workers:
            workers.submit(Worker.warm_up).result()
            for end in run_tasks(workers, [(task,)]).values():
                assert isinstance(end, ArmFailure), "no analysis of this study needs ARMS"
                failed = f"the saturation rate could not be measured: {end.sentence}"
                raise ValueError(f"{failed}; {REMEDY}")
    (row,) = files.finished()
    requests, seconds = row["requests"], row["makespan_s"]
    saturation = Saturation(arm, requests, seconds, requests / seconds)
    rate = f"{saturation.rate_rps:.3g} requests/s, with all {requests} queued at once"
    print_line(console, f"arms.{arm} saturates at {rate}; load.shares are shares of this rate")
    return saturation


HEAVY = 500_000  # requests that take some minutes, as compiling does: the next such study gains
UNCOMPILED = (
    "{count:,} requests are simulated uncompiled; compiled=always compiles the simulator once, "
    "and takes about two thirds of the time afterwards"
)


def could_compile(study: Study, requests: int) -> bool:
    """Return whether compiled modules would shorten a study of so many requests, and this machine
    can build them."""
    chosen = study.executor.compiled == "auto" and study.backend == "sim" and requests >= HEAVY
    return chosen and not is_used() and not missing()


MANY = 1 << 16  # jobs of an analysis that tries points: start as many processes as are allowed


@dataclass(frozen=True)
class Host:
    """Environment of a study: `load` builds the workload, `console` receives the messages."""

    load: LoadFunction = build_workload
    console: Console = field(default_factory=lambda: Console(stderr=True))


@named_errors()
def run_study(
    study: Study, name: str, root: Path, show: bool = True, host: Host | None = None
) -> Path:
    """Run a study, write its run folder, and return that folder.

    `name`  name of the entry
    `root`  folder of all outputs
    `show`  print the tables
    """
    started, host = time.perf_counter(), host or Host()
    console = host.console
    workload = check_and_load(study, name, root, console, host.load)
    run, interleaved = study.output.run or name, _interleaves_calibration(study)
    with RunFolder(*folder_names(study, name, root, workload)) as folder:
        running = _StudyRun(study, name, root, workload, folder, console, interleaved)
        report = running.with_loads().report(started)
        if show:
            report.show()
        report.track(run, folder.path)
    print_line(console, str(folder.path))
    raise_failures(report.failed, len(study.chosen()))
    raise_limit(study.analyses.explain.fail_on, report.summary)
    raise_unequal(study.analyses.rendezvous.fail_on, report.summary)
    raise_missed(report.summary)
    return folder.path


def folder_names(study: Study, name: str, root: Path, workload: Workload) -> tuple[Any, ...]:
    """Return the arguments of `RunFolder`, and of the check of its names, for a study."""
    config, run = as_yaml(asdict(study), workload), study.output.run or name
    # shapes depend on the arms
    shapes = _interleaves_calibration(study) or study.workload.kind == DESIGNED
    return root, study.folder, run, study.output.if_exists, config, () if shapes else GROWING


def _interleaves_calibration(study: Study) -> bool:
    """Whether calibration shapes run between the repeats, unless the study names a profile."""
    return bool(study.runs.load.shares) or study.runs.repeats > 1


@dataclass(frozen=True)
class _StudyRun:
    """A study in progress.

    `calibrates`  calibration shapes run between the study's runs, unless it names a profile
    `saturation`  saturation rate of the baseline; None where the study sets rates
    `shares`      loads as shares of that rate
    """

    study: Study
    name: str
    root: Path
    workload: Workload
    folder: RunFolder
    console: Console
    calibrates: bool
    saturation: Saturation | None = None
    shares: Sequence[float] = ()

    @cached_property
    def files(self) -> dict[str, ArmFiles]:
        """Files of each arm that has runs."""
        folder = self.folder.work
        runs = self.study.serves and not self.study.needs(POINTS)
        arms = [arm for arm in self.study.chosen() if runs and run_cells(self.study, arm)]
        return {arm: ArmFiles.of_arm(folder, arm, folder / READINGS) for arm in arms}

    @cached_property
    def repeat_row(self) -> Row | None:
        """Row of the repeated baseline; None where no analysis reads it."""
        if not (BACKENDS[self.study.backend].interleaved and self.study.needs(REPEAT)):
            return None
        arm = repeated_arm(self.study)
        files = repeat_files(self.folder.work, arm)
        return Row(REPEAT_ROW, arm, files, tuple(run_cells(self.study, arm)), is_repeat=True)

    @cached_property
    def calibration(self) -> Study | None:
        """Calibration between the study's runs; None where no profile is measured that way."""
        study = self.study
        compares = "compare_backends" in study.chosen_analyses()
        if not (self.calibrates and compares and study.timing.profile is None):
            return None
        return interleaved_calibration(study, self.workload.requests)

    @cached_property
    def rows(self) -> list[Row]:
        """Rows in order: the arms, the repeated baseline, the floor, plain transformers, the
        calibration."""
        study, folder = self.study, self.folder.work
        cells = {arm: tuple(run_cells(study, arm)) for arm in self.files}
        rows = [Row(arm, arm, files, cells[arm]) for arm, files in self.files.items()]
        rows += [self.repeat_row] if self.repeat_row else []
        rows += [floor_row(study, folder)] if study.needs(FLOOR) else []
        rows += (
            [plain_row(study, folder)]
            if BACKENDS[study.backend].interleaved and study.needs(PLAIN)
            else []
        )
        if self.calibration:
            rows += calibration_rows(self.calibration, folder / "calibration")
        return rows

    def with_loads(self) -> _StudyRun:
        """Return the study with rates for its `load.shares`; measures saturation first."""
        if not self.study.runs.load.shares:
            return self
        files = ArmFiles.alone(self.folder.work / "saturation", self.folder.work / READINGS)
        study, folder = self.study, self.folder.work
        measured = measure_saturation(study, self.workload, files, folder, self.console)
        first, *others = measured.shares(study.runs.load.shares)
        study = study.changed(
            # one sample path of arrivals, scaled to each load
            arrivals=study.arrivals.at_rate(first),
            load=LoadSweep(others, study.chosen() if others else [], study.runs.seeds),
            analyses=study.chosen_analyses(),
        )
        return replace(self, study=study, saturation=measured, shares=self.study.runs.load.shares)

    def report(self, started: float) -> Report:
        """Run every arm, run the analyses, write the folder, and return the report."""
        for row in self.rows:
            if corruption := row.files.corruption():
                files = f"its files are corrupt: {corruption}"
                print_line(self.console, f"arms.{row.name} is recomputed because {files}")
                row.files.remove()
        profile, requests = None, self.workload.requests
        # a profile that is not measured between the runs is found or measured before them
        if "compare_backends" in self.study.chosen_analyses() and self.calibration is None:
            profile = find_profile(self.study, requests) or measure_profile(
                self.study, requests, self.name, self.root, self.console
            )
        tried = self.study.needs(POINTS)
        processes = worker_count(self.study, MANY if tried else len(self.files))
        rows = max(1, len(self.rows))
        with workers_of(self.study, requests, rows, processes, self.folder.work) as workers:
            facts = self._check_device(workers)
            finished = self._finished(self._run(workers), facts, profile)
            finished = replace(finished, workers=workers) if tried else finished
            findings = [ANALYSES[name](finished) for name in self.study.chosen_analyses()]
            # first what two runs of the same settings have in common
            caveats = [*foreign_tokenizer(self.study), *self.workload.notes]
            caveats += [caveat for result in findings for caveat in result.caveats]
            summary = head(finished) | {"caveats": list(dict.fromkeys(caveats))}
            for result in findings:
                summary |= result.summary
            if finished.noise is not None:
                summary["machine_noise"] = finished.noise.summary()
            if self.saturation is not None:
                summary["saturation"] = asdict(self.saturation)
            summary |= run_facts(time.perf_counter() - started, PACKAGES_OF[self.study.backend])
            if self.study.plugins:
                summary["plugins"] = fingerprints(self.study.plugins)
            tables = [table for result in findings for table in result.every_table]
            write_before_report(summary, tables, self.folder)
            figures: list[Path] = []
            if self.study.output.figures:  # on the processes that ran the arms
                draws = {name: draw for result in findings for name, draw in result.figures.items()}
                stem = self.folder.work / "figures"
                jobs = [workers.submit(_draw_figure, draws[name], stem / name) for name in draws]
                drawn = [path for job in as_completed(jobs) for path in job.result()]
                figures = [path for path in drawn if path.suffix == ".png"]
        paths = [path.relative_to(self.folder.work) for path in figures]
        report = Report(self.study, self.name, footer(finished), summary, findings, paths)
        report.write_page(self.folder.work)
        finish_report(summary, self.folder)
        return report

    def _check_device(self, workers: Executor[Worker]) -> EngineFacts | None:
        """Return the facts of the engine's device, read in its process.

        ValueError where the study does not fit.
        """
        if self.study.backend != "engine":
            return None
        facts = workers.submit(lambda worker: engine_facts(worker.study)).result()
        check_device(self.study, facts)
        check_context(self.study, facts, self.workload.requests)
        lacks_package = OPTIONAL_PACKAGE not in facts.versions
        if self.study.model.is_hybrid and facts.kind == "cuda" and lacks_package:
            print_line(self.console, WITHOUT_OPTIONAL)
        return facts

    def _run(self, workers: Executor[Worker]) -> Outcomes:
        if not self.rows:
            return {}
        if BACKENDS[self.study.backend].interleaved and any(map(Row.is_unfinished, self.rows)):
            workers.submit(Worker.warm_up).result()
        per_run = self.study.workload.popularity.requests or len(self.workload.requests)
        designed = self.study.workload.kind == DESIGNED
        shapes = shapes_of(self.calibration or self.study) if self.calibration or designed else []
        totals = {
            row.name: sum(len(shapes[cell.seed].requests) for cell in row.cells)
            if row.calibrates or designed
            else per_run * len(row.cells)
            for row in self.rows
        }
        if could_compile(self.study, sum(totals.values())):
            print_line(self.console, UNCOMPILED.format(count=sum(totals.values())))
        with arm_progress(totals, self.console) as show:
            return run_tasks(workers, schedule_tasks(self.study, self.rows), show)

    def _finished(
        self, outcomes: Outcomes, facts: EngineFacts | None, profile: Profile | None
    ) -> Finished:
        """Return the input of the analyses; ValueError where all arms or the calibration failed."""
        ends = [end for row, end in sorted(outcomes.items()) if row < len(self.files)]
        failed = {end.arm: end.sentence for end in ends if isinstance(end, ArmFailure)}
        if self.files and len(failed) == len(self.files):
            first = next(iter(failed.values()))
            raise ValueError(f"no arm completed, the first error: {first}; {REMEDY}")
        for row, end in outcomes.items():
            if self.rows[row].calibrates and isinstance(end, ArmFailure):
                raise ValueError(f"the calibration failed: {end.sentence}; {REMEDY}")
        plain: ArmFiles | ArmFailure | None = None
        if (
            number := next((index for index, row in enumerate(self.rows) if row.plain), None)
        ) is not None:
            lost = outcomes.get(number)
            plain = lost if isinstance(lost, ArmFailure) else self.rows[number].files
        noise = None
        if facts:
            repeated = self.files.get(repeated_arm(self.study), next(iter(self.files.values())))
            repeat = self.repeat_row.files if self.repeat_row else None
            noise = noise_of(self.study, repeated, repeat, self.folder.work / READINGS)
        if facts and self.calibration:
            shapes = {row.arm: row.files for row in self.rows if row.calibrates}
            points = points_of(self.calibration, shapes)
            profile = profile_from_points(self.calibration, facts, points)
        return Finished(
            study=self.study,
            name=self.name,
            root=self.root,
            folder=self.folder.work,
            workload=self.workload,
            files={arm: files for arm, files in self.files.items() if arm not in failed},
            results=[end for end in ends if isinstance(end, ArmResult)],
            failed=failed,
            plain=plain,
            facts=facts,
            noise=noise,
            profile=profile,
            shares=self.saturation.shares(self.shares) if self.saturation else {},
        )


def _draw_figure(worker: Worker, draw: Callable[[], Figure | None], stem: Path) -> list[Path]:
    from spanlab.report.style import write_figure  # loads matplotlib, half a second

    return write_figure(draw, stem)


# ------------------------------------------------------------------------------
# The calibrated profile with which a study measures the simulator's prediction error.
# ------------------------------------------------------------------------------


def measure_profile(
    study: Study, requests: tuple[Request, ...], name: str, root: Path, console: Console
) -> Profile:
    """Run a separate calibration and return its profile.

    It is stored for later studies if the machine was calm.
    """
    missing, stored = f"no profile of {study.model.name} on this machine", local_profile(study)
    if stored is not None:
        covered = f"(the stored one covers {stored.longest:,})"
        missing += f" covers {_longest(study, requests):,} tokens {covered}"
    print_line(console, f"{missing}: measuring one first, for the simulator")
    calibration = calibration_of(study, requests)
    output = replace(study.output, run=f"{name}_calibration", if_exists="replace")
    calibration = replace(calibration, tracking=replace(study.tracking, kind="none"), output=output)
    folder = run_study(calibration, "calibrate", root, show=False)
    print_line(console, orjson.loads((folder / "summary.json").read_bytes())["fit_profile"]["kept"])
    return read_profile(folder / "profile.json")


def find_profile(study: Study, requests: tuple[Request, ...]) -> Profile | None:
    """Return the study's profile, or a stored one that covers the longest prompt; else None."""
    if study.timing.profile is not None:
        return profile_of(study)
    profile = local_profile(study)
    return profile if profile is not None and profile.longest >= _longest(study, requests) else None


def interleaved_calibration(study: Study, requests: tuple[Request, ...]) -> Study:
    """Return a calibration for one round before each of a study's repeats, and one at the end."""
    calibration = calibration_of(study, requests)
    return calibration.changed(
        design=replace(calibration.analyses.compare_backends, repeats=study.runs.repeats + 1)
    )


def calibration_rows(calibration: Study, folder: Path) -> list[Row]:
    """Rows of a calibration within another study; the files are in `folder`."""
    files = {arm: ArmFiles.of_arm(folder, arm) for arm in calibration.chosen()}
    cells = {arm: tuple(run_cells(calibration, arm)) for arm in files}
    return [
        Row(CALIBRATION_PREFIX + arm, arm, files[arm], cells[arm], calibrates=True)
        for arm in files
        if cells[arm]
    ]


def _longest(study: Study, requests: tuple[Request, ...]) -> int:
    return study.analyses.compare_backends.longest or max(
        request.num_tokens for request in requests
    )

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

from spanlab.analyses.base import Findings, Finished, Report, footer, foreign_tokenizer, head
from spanlab.analyses.fit_profile import points_of, profile_from_points
from spanlab.build import build_workload, local_profile, profile_of
from spanlab.core.request import Request
from spanlab.plugins import fingerprints, named_errors
from spanlab.provenance import PACKAGES_OF, run_facts
from spanlab.settings.analyses import ANALYSES, DESIGNED, POINTS, REPEAT
from spanlab.settings.server import LoadSweep
from spanlab.settings.study import Study, worker_count
from spanlab.study.backends import BACKENDS
from spanlab.study.bounds import REMEDY, ArmFailure, ArmResult, raise_failures, raise_limit, raise_missed
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
    WITHOUT_OPTIONAL,
    EngineFacts,
    Noise,
    engine_facts,
    floor_row,
    noise_of,
    readings_of,
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


def measure_saturation(study: Study, workload: Workload, files: ArmFiles, folder: Path, console: Console) -> Saturation:
    """Measure the baseline's saturation rate, or read it from `files` of an interrupted run."""
    arm = study.baseline
    if not files.finished():
        _run(study, workload, files, folder)
    (row,) = files.finished()
    saturation = Saturation(arm, row["requests"], row["makespan_s"], row["requests"] / row["makespan_s"])
    text = (
        f"arms.{arm} saturates at {saturation.rate_rps:.3g} requests/s, with all {saturation.requests} queued at once"
    )
    print_line(console, f"{text}; load.shares are shares of this rate")
    return saturation


def _run(study: Study, workload: Workload, files: ArmFiles, folder: Path) -> None:
    at_once = replace(
        study,
        arrivals=Saturating(order=study.arrivals.order),
        load=LoadSweep(),
        repeats=1,
        analyses=["compare_backends"],
        engine=replace(study.engine, record="nothing", teacher=None),
    )
    task = Task(0, study.baseline, files, tuple(run_cells(at_once, study.baseline)))
    with workers_of(at_once, workload.requests, 1, 1, folder) as workers:
        workers.submit(Worker.warm_up).result()
        for end in run_tasks(workers, [(task,)]).values():
            assert isinstance(end, ArmFailure), "no analysis of this study needs ARMS"
            raise ValueError(f"the saturation rate could not be measured: {end.sentence}; {REMEDY}")


def at_saturation_shares(study: Study, saturation: Saturation) -> Study:
    """Return the study with rates at its shares of saturation: one sample path of arrivals, scaled to each load."""
    first, *other_rates = saturation.shares(study.load.shares)
    arms = study.chosen() if other_rates else []
    load = LoadSweep(rates_rps=other_rates, arms=arms, seeds=study.seeds)
    arrivals = study.arrivals.at_rate(first)
    return replace(study, arrivals=arrivals, load=load, analyses=study.chosen_analyses())


MANY = 1 << 16  # jobs of an analysis that tries points: start as many processes as are allowed


@dataclass(frozen=True)
class Host:
    """Environment of a study: `load` builds the workload, `console` receives the messages."""

    load: LoadFunction = build_workload
    console: Console = field(default_factory=lambda: Console(stderr=True))


@named_errors()
def run_study(study: Study, name: str, root: Path, show: bool = True, host: Host | None = None) -> Path:
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
        report = _StudyRun(study, name, root, workload, folder, console, interleaved).with_loads().report(started)
        if show:
            report.show()
        report.track(run, folder.path)
    print_line(console, str(folder.path))
    raise_failures(report.failed, len(study.chosen()))
    raise_limit(study.fail_on, report.summary)
    raise_missed(report.summary)
    return folder.path


def folder_names(study: Study, name: str, root: Path, workload: Workload) -> tuple[Any, ...]:
    """Return the arguments of `RunFolder`, and of the check of its names, for a study."""
    config, run = as_yaml(asdict(study), workload), study.output.run or name
    shapes = _interleaves_calibration(study) or study.workload.kind == DESIGNED  # they depend on the arms
    return root, study.folder, run, study.output.if_exists, config, () if shapes else GROWING


def _interleaves_calibration(study: Study) -> bool:
    """Whether calibration shapes are interleaved with the repeated runs, unless the study names a profile."""
    return bool(study.load.shares) or study.repeats > 1


@dataclass(frozen=True)
class _StudyRun:
    """A study in progress.

    `calibrates`  calibration shapes are interleaved with the study's runs, unless the study names a profile
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
        return {arm: ArmFiles.of_arm(folder, arm, readings_of(folder)) for arm in arms}

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
        """Calibration that is interleaved with the study's runs; None where no profile is measured that way."""
        needs_profile = "compare_backends" in self.study.chosen_analyses() and self.study.timing.profile is None
        if not (self.calibrates and needs_profile):
            return None
        return interleaved_calibration(self.study, self.workload.requests)

    @cached_property
    def rows(self) -> list[Row]:
        """Rows in order: the arms, the repeated baseline, the floor, the calibration."""
        rows = [Row(arm, arm, files, tuple(run_cells(self.study, arm))) for arm, files in self.files.items()]
        rows += [row for row in (self.repeat_row, floor_row(self.study, self.folder.work)) if row]
        return rows + (calibration_rows(self.calibration, self.folder.work / "calibration") if self.calibration else [])

    def with_loads(self) -> _StudyRun:
        """Return the study with request rates for its `load.shares`; this measures the saturation rate first."""
        if not self.study.load.shares:
            return self
        files = ArmFiles.alone(self.folder.work / "saturation", readings_of(self.folder.work))
        measured = measure_saturation(self.study, self.workload, files, self.folder.work, self.console)
        study = at_saturation_shares(self.study, measured)
        return replace(self, study=study, saturation=measured, shares=self.study.load.shares)

    def report(self, started: float) -> Report:
        """Run every arm, run the analyses, write the folder, and return the report."""
        self._drop_corrupt()
        profile = self._profile()
        tried = self.study.needs(POINTS)
        processes = worker_count(self.study, MANY if tried else len(self.files))
        rows = max(1, len(self.rows))
        with workers_of(self.study, self.workload.requests, rows, processes, self.folder.work) as workers:
            facts = self._check_device(workers)
            finished = self._finished(self._run(workers), facts, profile)
            finished = replace(finished, workers=workers) if tried else finished
            findings = [ANALYSES[name](finished) for name in self.study.chosen_analyses()]
            summary = self._summary(finished, findings)
            summary |= run_facts(time.perf_counter() - started, PACKAGES_OF[self.study.backend])
            if self.study.plugins:
                summary["plugins"] = fingerprints(self.study.plugins)
            write_before_report(summary, [table for result in findings for table in result.every_table], self.folder)
            figures = self._draw(workers, findings) if self.study.output.figures else []
        paths = [path.relative_to(self.folder.work) for path in figures]
        report = Report(self.study, self.name, footer(finished), summary, findings, paths)
        report.write_page(self.folder.work)
        finish_report(summary, self.folder)
        return report

    def _drop_corrupt(self) -> None:
        """Remove the files of each arm that cannot be resumed, and print the reason."""
        for row in self.rows:
            corruption = row.files.corruption()
            if corruption:
                print_line(self.console, f"arms.{row.name} is recomputed because its files are corrupt: {corruption}")
                row.files.remove()

    def _profile(self) -> Profile | None:
        """Profile before any arm runs; None where no analysis reads one, or its calibration is interleaved."""
        study, requests = self.study, self.workload.requests
        if "compare_backends" not in study.chosen_analyses() or self.calibration is not None:
            return None
        profile = find_profile(study, requests)
        return profile or measure_profile(study, requests, self.name, self.root, self.console)

    def _check_device(self, workers: Executor[Worker]) -> EngineFacts | None:
        """Return the facts of the engine's device, read in its process; ValueError where the study does not fit."""
        if self.study.backend != "engine":
            return None
        facts = workers.submit(_engine_facts).result()
        check_device(self.study, facts)
        check_context(self.study, facts, self.workload.requests)
        if self.study.model.is_hybrid and facts.kind == "cuda" and OPTIONAL_PACKAGE not in facts.versions:
            print_line(self.console, WITHOUT_OPTIONAL)
        return facts

    def _run(self, workers: Executor[Worker]) -> Outcomes:
        if not self.rows:
            return {}
        if BACKENDS[self.study.backend].interleaved and any(row.is_unfinished() for row in self.rows):
            workers.submit(Worker.warm_up).result()
        with arm_progress(self._totals(), self.console) as show:
            return run_tasks(workers, schedule_tasks(self.study, self.rows), show)

    def _totals(self) -> dict[str, int]:
        """Number of requests of each row."""
        per_run = self.study.workload.popularity.requests or len(self.workload.requests)
        shapes = shapes_of(self.calibration or self.study) if self._runs_shapes(self.rows[-1]) else []
        return {
            row.name: sum(len(shapes[cell.seed].requests) if self._runs_shapes(row) else per_run for cell in row.cells)
            for row in self.rows
        }

    def _runs_shapes(self, row: Row) -> bool:
        return row.calibrates or self.study.workload.kind == DESIGNED

    def _finished(self, outcomes: Outcomes, facts: EngineFacts | None, profile: Profile | None) -> Finished:
        """Return the input of the analyses; ValueError where every arm failed, or the calibration failed."""
        arm_outcomes = [outcome for row, outcome in sorted(outcomes.items()) if row < len(self.files)]
        failed = {outcome.arm: outcome.sentence for outcome in arm_outcomes if isinstance(outcome, ArmFailure)}
        if self.files and len(failed) == len(self.files):
            raise ValueError(f"no arm completed, the first error: {next(iter(failed.values()))}; {REMEDY}")
        shapes = [end for row, end in outcomes.items() if self.rows[row].calibrates and isinstance(end, ArmFailure)]
        if shapes:
            raise ValueError(f"the calibration failed: {shapes[0].sentence}; {REMEDY}")
        return Finished(
            study=self.study,
            name=self.name,
            root=self.root,
            folder=self.folder.work,
            workload=self.workload,
            files={arm: files for arm, files in self.files.items() if arm not in failed},
            results=[outcome for outcome in arm_outcomes if isinstance(outcome, ArmResult)],
            failed=failed,
            facts=facts,
            noise=self._noise() if facts else None,
            profile=self._fit_profile(facts) if facts and self.calibration else profile,
            shares=self.saturation.shares(self.shares) if self.saturation else {},
        )

    def _noise(self) -> Noise:
        baseline = self.files.get(repeated_arm(self.study), next(iter(self.files.values())))
        repeat = self.repeat_row.files if self.repeat_row else None
        return noise_of(self.study, baseline, repeat, readings_of(self.folder.work))

    def _fit_profile(self, facts: EngineFacts) -> Profile:
        """Fit the profile of the interleaved calibration."""
        assert self.calibration is not None, "called only with an interleaved calibration"
        points = points_of(self.calibration, {row.arm: row.files for row in self.rows if row.calibrates})
        return profile_from_points(self.calibration, facts, points)

    def _summary(self, finished: Finished, findings: list[Findings]) -> dict[str, Any]:
        """Contents of `summary.json` that are equal for two runs of the same settings."""
        caveats = [*foreign_tokenizer(self.study), *self.workload.notes]
        caveats += [caveat for result in findings for caveat in result.caveats]
        summary = head(finished) | {"caveats": list(dict.fromkeys(caveats))}
        for result in findings:
            summary |= result.summary
        if finished.noise is not None:
            summary["machine_noise"] = finished.noise.summary()
        if self.saturation is not None:
            summary["saturation"] = asdict(self.saturation)
        return summary

    def _draw(self, workers: Executor[Worker], findings: list[Findings]) -> list[Path]:
        """Draw every figure on the processes that ran the arms, and return the PNG files."""
        folder = self.folder.work / "figures"
        draws = {name: draw for result in findings for name, draw in result.figures.items()}
        jobs = [workers.submit(_draw_figure, draw, folder / name) for name, draw in draws.items()]
        return [path for job in as_completed(jobs) for path in job.result() if path.suffix == ".png"]


def _engine_facts(worker: Worker) -> EngineFacts:
    return engine_facts(worker.study)


def _draw_figure(worker: Worker, draw: Callable[[], Figure | None], stem: Path) -> list[Path]:
    from spanlab.report.style import write_figure  # loads matplotlib, half a second

    return write_figure(draw, stem)


# ------------------------------------------------------------------------------
# The calibrated profile with which a study measures the simulator's prediction error.
# ------------------------------------------------------------------------------


def measure_profile(study: Study, requests: tuple[Request, ...], name: str, root: Path, console: Console) -> Profile:
    """Run a separate calibration and return its profile; it is stored for later studies if the machine was calm."""
    print_line(console, f"{_describe_missing_profile(study, requests)}: measuring one first, for the simulator")
    calibration = calibration_of(study, requests)
    output = replace(study.output, run=f"{name}_calibration", if_exists="replace")
    calibration = replace(calibration, tracking=replace(study.tracking, kind="none"), output=output)
    folder = run_study(calibration, "calibrate", root, show=False)
    print_line(console, orjson.loads((folder / "summary.json").read_bytes())["fit_profile"]["kept"])
    return read_profile(folder / "profile.json")


def _describe_missing_profile(study: Study, requests: tuple[Request, ...]) -> str:
    text, profile = f"no profile of {study.model.name} on this machine", local_profile(study)
    if profile is None:
        return text
    return f"{text} covers {_longest(study, requests):,} tokens (the stored one covers {profile.longest:,})"


def find_profile(study: Study, requests: tuple[Request, ...]) -> Profile | None:
    """Return the profile that the study names, or a stored one that covers the longest prompt; else None."""
    if study.timing.profile is not None:
        return profile_of(study)
    profile = local_profile(study)
    return profile if profile is not None and profile.longest >= _longest(study, requests) else None


def interleaved_calibration(study: Study, requests: tuple[Request, ...]) -> Study:
    """Return a calibration that is interleaved with a study's repeats: one round before each, one after the last."""
    calibration = calibration_of(study, requests)
    return replace(calibration, design=replace(calibration.design, repeats=study.repeats + 1))


def calibration_rows(calibration: Study, folder: Path) -> list[Row]:
    """Rows of a calibration within another study; the files are in `folder`."""
    files = {arm: ArmFiles.of_arm(folder, arm) for arm in calibration.chosen()}
    calibration_rows = [
        Row(CALIBRATION_PREFIX + arm, arm, files[arm], tuple(run_cells(calibration, arm)), calibrates=True)
        for arm in files
    ]
    return [row for row in calibration_rows if row.cells]


def _longest(study: Study, requests: tuple[Request, ...]) -> int:
    return study.design.longest or max(request.num_tokens for request in requests)

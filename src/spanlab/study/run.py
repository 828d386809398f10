"""One study from settings to report."""

from __future__ import annotations

import time
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from spanlab import build
from spanlab.fidelity import clean
from spanlab.fidelity.replay import design_for
from spanlab.report.data import StudyData
from spanlab.report.figures import FIGURES
from spanlab.report.table import print_table
from spanlab.settings import Study, worker_count
from spanlab.study import checks, provenance, results, turns
from spanlab.study.aa import noise_of, readings_of, repeat_files, told
from spanlab.study.arm_files import ArmFiles
from spanlab.study.arms import Arms, arms_of
from spanlab.study.backends import BACKENDS
from spanlab.study.cells import cells
from spanlab.study.config import GROWING, as_yaml
from spanlab.study.device import GETTING_IT, OPTIONAL, EngineFacts, engine_facts
from spanlab.study.folder import RunFolder
from spanlab.study.progress import ArmProgress, say
from spanlab.study.worker import Worker
from spanlab.terminal import printed
from spanlab.tracking import check_login, tracked
from spanlab.workloads import Workload
from spanlab_sim.calibrated import Profile


def run_study(study: Study, name: str, root: Path, show: bool = True) -> Path:
    """Run a study and leave its folder; returns the folder.

    `name` is the entry's, `root` where outputs go; `show` prints the table.
    """
    started = time.perf_counter()
    console = Console(stderr=True)
    workload = _checked(study, name, root, console)
    run = study.output.run or name
    made_of = as_yaml(asdict(study), workload.requests)
    with RunFolder(root, study.workload.kind, run, study.output.if_exists, made_of, GROWING) as folder:
        report = _Running(study, name, root, workload, folder, console).report(started)
        if show:
            report.show()
        report.track(run, folder.path)
    say(console, str(folder.path))
    results.raise_failures(report.data.failed, len(study.chosen()))
    return folder.path


def _checked(study: Study, name: str, root: Path, console: Console) -> Workload:
    """The workload, once nothing speaks against the study."""
    checks.check_packages(study)
    check_login(study.tracking)
    return prepared(study, name, root, console)


def prepared(study: Study, name: str, root: Path, console: Console) -> Workload:
    """The workload, once no check of the settings speaks against the study; needs no package of the engine."""
    checks.check_pools(study)
    workload = build.build_workload(study.workload, str(root / ".cache"))
    say(console, f"{name} · {workload.name} · {workload.provenance.line()}")
    if (note := checks.note_on_times(study, workload.requests)) is not None:
        say(console, note)
    checks.check_memory(study)
    checks.check_fit(study, workload.requests)
    checks.check_marks(study, workload.requests)
    checks.check_learning(study, workload.requests)
    return workload


@dataclass(frozen=True)
class _Report:
    """What a study came to: for the terminal and the tracker."""

    study: Study
    data: StudyData
    summary: dict[str, Any]
    gap: clean.Comparison | None
    figures: list[Path]

    def show(self) -> None:
        """Print the table, and how well the simulator predicts an engine study."""
        with printed() as console:
            print_table(self.data, console)
            if self.gap is not None:
                console.print("", self.gap.table())

    def track(self, run: str, folder: Path) -> None:
        """Hand everything to the tracker, in the folder where it stays."""
        with tracked(self.study.tracking, run, self.data.title, asdict(self.study), folder) as tracker:
            tracker.figures([folder / path for path in self.figures])
            tracker.summary(self.summary)
            tracker.table("arms", *results.flat_table(self.summary))


@dataclass(frozen=True)
class _Running:
    """A study while its folder is written."""

    study: Study
    name: str
    root: Path
    workload: Workload
    folder: RunFolder
    console: Console

    @cached_property
    def files(self) -> dict[str, ArmFiles]:
        """The files of each arm."""
        folder = self.folder
        log = folder.steps, readings_of(folder.work)
        return {arm: ArmFiles(folder.records(arm), folder.runs(arm), *log) for arm in self.study.chosen()}

    @cached_property
    def again(self) -> ArmFiles | None:
        """The files of the repeated baseline, where there is one."""
        wanted = BACKENDS[self.study.backend].in_turns
        return repeat_files(self.folder.work, turns.repeated(self.study)) if wanted else None

    @cached_property
    def rows(self) -> list[tuple[str, str, ArmFiles]]:
        """What is run: its name, its arm, its files; the repeat comes last."""
        found = [(arm, arm, own) for arm, own in self.files.items()]
        return found + ([(turns.AGAIN, turns.repeated(self.study), self.again)] if self.again else [])

    def report(self, started: float) -> _Report:
        """Run every arm, compare, publish; with what is to be shown of it."""
        self._drop_corrupt()
        processes = worker_count(self.study, len(self.files))
        with arms_of(self.study, self.workload.requests, len(self.rows), processes, self.folder.work) as arms:
            facts, profile = self._look_at_device(arms), self._profile(arms)
            outcome = results.Outcome.of(self._run(arms)[: len(self.files)], facts)
            data, summary, gap = self._compare(outcome, profile)
            summary |= provenance.run_facts(time.perf_counter() - started, provenance.PACKAGES_OF[self.study.backend])
            self._write(summary)
            self.folder.complete()
            figures = self._draw(arms, data, gap) if self.study.output.figures else []
        self.folder.finish()
        return _Report(self.study, data, summary, gap, [path.relative_to(self.folder.work) for path in figures])

    def _drop_corrupt(self) -> None:
        """Forget an arm whose files cannot be gone on with, and say which."""
        for row, _, files in self.rows:
            corruption = files.corruption()
            if corruption:
                say(self.console, f"arms.{row} is computed again, for its files are corrupt: {corruption}")
                files.remove()

    def _look_at_device(self, arms: Arms) -> EngineFacts | None:
        """What the engine will run on, asked where it will; refuse a store that it has no room for."""
        if self.study.backend != "engine":
            return None
        facts = arms.ask(_engine_facts)
        checks.check_device(self.study, facts)
        if self.study.model.is_hybrid and facts.kind == "cuda" and OPTIONAL not in facts.versions:
            slower = f"{OPTIONAL} is not installed: recurrent layers take transformers' own slower path"
            say(self.console, f"{slower}; {GETTING_IT}")
        return facts

    def _profile(self, arms: Arms) -> Profile | None:
        """The timing model by which an engine study says how well it is predicted; None where nobody asks."""
        study = self.study
        if self.again is not None:
            arms.ask(_warm_up)
        if not study.fidelity.wanted(study.backend):
            return None
        design = design_for(study, self.workload.requests)
        return arms.ask(Worker.on_backend, partial(clean.make_profile, study, design, self.root))

    def _run(self, arms: Arms) -> list[results.ArmResult | results.ArmFailure]:
        running = arms.start(turns.tasks(self.study, self.files, self.again))
        with ArmProgress(self._totals(), self.console) as progress:
            return arms.finish(running, progress.show, 0.2)

    def _totals(self) -> dict[str, int]:
        """Requests to finish, by row."""
        drawn = self.study.workload.popularity.requests or len(self.workload.requests)
        return {row: drawn * len(cells(self.study, arm)) for row, arm, _ in self.rows}

    def _compare(
        self, outcome: results.Outcome, profile: Profile | None
    ) -> tuple[StudyData, dict[str, Any], clean.Comparison | None]:
        """Arms side by side; on the engine the machine's noise, and how far the simulator is off."""
        data, summary = results.compare(self.study, self.name, self.workload, outcome)
        if self.again is not None:
            data = told(data, summary, noise_of(self.study, self.files[turns.repeated(self.study)], self.again))
        if profile is None:
            return data, summary, None
        gap = self._gap(outcome.failed, profile)
        return data, summary | {"fidelity": gap.summary()}, gap

    def _gap(self, failed: dict[str, str], profile: Profile) -> clean.Comparison:
        ran = {arm: own for arm, own in self.files.items() if arm not in failed}
        return clean.compare_run(self.study, self.workload.requests, ran, profile, self.folder.work / "simulated")

    def _write(self, summary: dict[str, Any]) -> None:
        text = orjson.dumps(summary, option=orjson.OPT_INDENT_2) + b"\n"
        (self.folder.work / "summary.json").write_bytes(text)

    def _draw(self, arms: Arms, data: StudyData, gap: clean.Comparison | None) -> list[Path]:
        """Every figure, on the processes that ran the arms; returns the images."""
        folder = self.folder.work / "figures"
        jobs = [arms.submit(_draw_one, data, name, folder) for name in FIGURES]
        drawn = [path for job in as_completed(jobs) for path in arms.result(job)]
        drawn += gap.draw(f"{data.title} · {data.footer}", folder) if gap is not None else []
        return [path for path in drawn if path.suffix == ".png"]


def _engine_facts(worker: Worker) -> EngineFacts:
    return engine_facts(worker.study)


def _warm_up(worker: Worker) -> None:
    worker.on_backend(lambda backend: backend.warm_up(worker.requests))


def _draw_one(worker: Worker, data: StudyData, name: str, folder: Path) -> list[Path]:
    from spanlab.report.write import draw_one  # matplotlib: half a second that only drawing needs

    return draw_one(data, name, folder)

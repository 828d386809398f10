"""One study from settings to report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from rich.console import Console

from spanlab import build
from spanlab.plugins import fingerprints
from spanlab.report import faces
from spanlab.report.tables import Table
from spanlab.settings import Study, worker_count
from spanlab.settings.analyses import ANALYSES, DESIGNED, POINTS, REPEAT, needed
from spanlab.study import checks
from spanlab.study.analyses.head import footer, head
from spanlab.study.execution import turns
from spanlab.study.execution.arms import Arms, Ends, arms_of
from spanlab.study.execution.backends import BACKENDS
from spanlab.study.execution.cells import cells
from spanlab.study.execution.saturation import Saturation, measure_saturation, paced
from spanlab.study.execution.turns import Row
from spanlab.study.execution.worker import Worker
from spanlab.study.fidelity import calibration
from spanlab.study.fidelity.fit_profile import fitted, points_of
from spanlab.study.fidelity.shapes import shapes_of
from spanlab.study.findings import Findings, Finished
from spanlab.study.foreign_tokenizer import foreign_tokenizer
from spanlab.study.machine.aa import noise_of, readings_of, repeat_files
from spanlab.study.machine.device import GETTING_IT, OPTIONAL, EngineFacts, engine_facts
from spanlab.study.machine.floor import floor_row
from spanlab.study.machine.noise import Noise
from spanlab.study.numbers import results
from spanlab.study.numbers.results import ArmFailure, ArmResult
from spanlab.study.output import provenance
from spanlab.study.output.arm_files import ArmFiles
from spanlab.study.output.config import GROWING, as_yaml
from spanlab.study.output.folder import RunFolder
from spanlab.study.output.report import Report
from spanlab.study.prepare import Load, checked
from spanlab.study.progress import ArmProgress, say
from spanlab.workloads import Workload
from spanlab_sim.calibrated import Profile

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MANY = 1 << 16  # jobs of an analysis that tries points: as many processes as are allowed


@dataclass(frozen=True)
class Host:
    """What a study is run by: `load` makes its workload, `console` hears what is done."""

    load: Load = build.build_workload
    console: Console = field(default_factory=lambda: Console(stderr=True))


def run_study(study: Study, name: str, root: Path, show: bool = True, host: Host | None = None) -> Path:
    """Run a study and leave its folder; returns the folder.

    `name` is the entry's, `root` where outputs go; `show` prints the table.
    """
    started, host = time.perf_counter(), host or Host()
    console = host.console
    workload = checked(study, name, root, console, host.load)
    run = study.output.run or name
    made_of = as_yaml(asdict(study), workload)
    in_turns = _calibrates_in_turns(study)
    growing = () if in_turns or study.workload.kind == DESIGNED else GROWING  # shapes go by arms
    with RunFolder(root, study.folder, run, study.output.if_exists, made_of, growing) as folder:
        report = _Running(study, name, root, workload, folder, console, in_turns).at_loads().report(started)
        if show:
            report.show()
        report.track(run, folder.path)
    say(console, str(folder.path))
    results.raise_failures(report.failed, len(study.chosen()))
    results.raise_limit(study.fail_on, report.summary)
    results.raise_missed(report.summary)
    return folder.path


def _calibrates_in_turns(study: Study) -> bool:
    """Whether shapes take turns with runs that are repeated, where no profile is named."""
    return bool(study.load.shares) or study.repeats > 1


@dataclass(frozen=True)
class _Running:
    """A study while its folder is written.

    `calibrates`  shapes take turns with the study's runs, where no profile is named
    `saturation`  what `shares` are shares of, where the study has such loads
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
        """The files of each arm that has runs."""
        folder = self.folder
        log = folder.steps, readings_of(folder.work)
        runs = self.study.serves and not needed(self.study, POINTS)
        arms = [arm for arm in self.study.chosen() if runs and cells(self.study, arm)]
        return {arm: ArmFiles(folder.records(arm), folder.runs(arm), *log) for arm in arms}

    @cached_property
    def again(self) -> Row | None:
        """The repeated baseline, where an analysis reads it."""
        if not (BACKENDS[self.study.backend].in_turns and needed(self.study, REPEAT)):
            return None
        arm = turns.repeated(self.study)
        files = repeat_files(self.folder.work, arm)
        return Row(turns.AGAIN, arm, files, tuple(cells(self.study, arm)), again=True)

    @cached_property
    def calibration(self) -> Study | None:
        """The calibration that takes turns with the study's runs."""
        asked = "compare_backends" in self.study.chosen_analyses() and self.study.timing.profile is None
        return calibration.in_turns(self.study, self.workload.requests) if self.calibrates and asked else None

    @cached_property
    def rows(self) -> list[Row]:
        """What is run: the arms, the repeated baseline, the calibration."""
        found = [Row(arm, arm, own, tuple(cells(self.study, arm))) for arm, own in self.files.items()]
        found += [row for row in (self.again, floor_row(self.study, self.folder.work)) if row]
        shapes = self.folder.work / "calibration"
        return found + (calibration.rows(self.calibration, shapes) if self.calibration else [])

    def at_loads(self) -> _Running:
        """The study at its own rates, or at shares of the rate that saturates the baseline, which is measured first."""
        if not self.study.load.shares:
            return self
        own = self.folder.work / "saturation"
        files = ArmFiles(own / "records.jsonl", own / "runs.jsonl", own / "steps", readings_of(self.folder.work))
        found = measure_saturation(self.study, self.workload, files, self.folder.work, self.console)
        return replace(self, study=paced(self.study, found), saturation=found, shares=self.study.load.shares)

    def report(self, started: float) -> Report:
        """Run every arm, compare, publish; with what is to be shown of it."""
        self._drop_corrupt()
        profile = self._profile()
        tried = needed(self.study, POINTS)
        processes = worker_count(self.study, MANY if tried else len(self.files))
        with arms_of(self.study, self.workload.requests, max(1, len(self.rows)), processes, self.folder.work) as arms:
            facts = self._look_at_device(arms)
            finished = self._finished(self._run(arms), facts, profile)
            finished = replace(finished, arms=arms) if tried else finished
            findings = [ANALYSES[name](finished) for name in self.study.chosen_analyses()]
            summary = self._summary(finished, findings)
            summary |= provenance.run_facts(time.perf_counter() - started, provenance.PACKAGES_OF[self.study.backend])
            if self.study.plugins:
                summary["plugins"] = fingerprints(self.study.plugins)
            self._write(summary, [table for found in findings for table in found.every_table])
            self.folder.complete()
            figures = self._draw(arms, findings) if self.study.output.figures else []
        paths = [path.relative_to(self.folder.work) for path in figures]
        report = Report(self.study, self.name, footer(finished), summary, findings, paths)
        report.write_page(self.folder.work)
        self.folder.finish()
        return report

    def _drop_corrupt(self) -> None:
        """Forget an arm whose files cannot be gone on with, and say which."""
        for row in self.rows:
            corruption = row.files.corruption()
            if corruption:
                say(self.console, f"arms.{row.name} is computed again, for its files are corrupt: {corruption}")
                row.files.remove()

    def _profile(self) -> Profile | None:
        """The profile before any arm runs; None where no analysis reads one, or it is measured in turns."""
        study, requests = self.study, self.workload.requests
        if "compare_backends" not in study.chosen_analyses() or self.calibration is not None:
            return None
        found = calibration.known_profile(study, requests)
        return found or calibration.made_profile(study, requests, self.name, self.root, self.console)

    def _look_at_device(self, arms: Arms) -> EngineFacts | None:
        """What the engine will run on, asked where it will; refuse a store that it has no room for."""
        if self.study.backend != "engine":
            return None
        facts = arms.ask(_engine_facts)
        checks.check_device(self.study, facts)
        checks.check_context(self.study, facts, self.workload.requests)
        if self.study.model.is_hybrid and facts.kind == "cuda" and OPTIONAL not in facts.versions:
            slower = f"{OPTIONAL} is not installed: recurrent layers take transformers' own slower path"
            say(self.console, f"{slower}; {GETTING_IT}")
        return facts

    def _run(self, arms: Arms) -> Ends:
        if not self.rows:
            return {}
        if BACKENDS[self.study.backend].in_turns and any(row.lacking() for row in self.rows):
            arms.ask(Worker.warm_up)
        running = arms.start(turns.tasks(self.study, self.rows))
        with ArmProgress(self._totals(), self.console) as progress:
            return arms.finish(running, progress.show, 0.2)

    def _totals(self) -> dict[str, int]:
        """Requests to finish, by row."""
        drawn = self.study.workload.popularity.requests or len(self.workload.requests)
        shapes = shapes_of(self.calibration or self.study) if self._shaped(self.rows[-1]) else []
        return {
            row.name: sum(len(shapes[cell.seed].requests) if self._shaped(row) else drawn for cell in row.cells)
            for row in self.rows
        }

    def _shaped(self, row: Row) -> bool:
        return row.calibrates or self.study.workload.kind == DESIGNED

    def _finished(self, ends: Ends, facts: EngineFacts | None, profile: Profile | None) -> Finished:
        """What analyses read; ValueError where no arm ran to its end, or the calibration did not."""
        of_arms = [end for row, end in sorted(ends.items()) if row < len(self.files)]
        failed = {end.arm: end.sentence for end in of_arms if isinstance(end, ArmFailure)}
        if self.files and len(failed) == len(self.files):
            first = next(iter(failed.values()))
            raise ValueError(f"no arm ran to its end, the first for this: {first}; {results.WAY_OUT}")
        shapes = [end for row, end in ends.items() if self.rows[row].calibrates and isinstance(end, ArmFailure)]
        if shapes:
            raise ValueError(f"the calibration failed: {shapes[0].sentence}; {results.WAY_OUT}")
        return Finished(
            study=self.study,
            name=self.name,
            root=self.root,
            folder=self.folder.work,
            workload=self.workload,
            files={arm: own for arm, own in self.files.items() if arm not in failed},
            results=[end for end in of_arms if isinstance(end, ArmResult)],
            failed=failed,
            facts=facts,
            noise=self._noise() if facts else None,
            profile=self._fitted(facts) if facts and self.calibration else profile,
            shares=self.saturation.shares(self.shares) if self.saturation else {},
        )

    def _noise(self) -> Noise:
        baseline = self.files.get(turns.repeated(self.study), next(iter(self.files.values())))
        again = self.again.files if self.again else None
        return noise_of(self.study, baseline, again, readings_of(self.folder.work))

    def _fitted(self, facts: EngineFacts) -> Profile:
        """The profile of the calibration that took turns."""
        assert self.calibration is not None, "called where there is one"
        points = points_of(self.calibration, {row.arm: row.files for row in self.rows if row.calibrates})
        return fitted(self.calibration, facts, points)

    def _summary(self, finished: Finished, findings: list[Findings]) -> dict[str, Any]:
        """What `summary.json` holds, but for what differs between two runs of the same settings."""
        said = [*foreign_tokenizer(self.study), *(sentence for found in findings for sentence in found.caveats)]
        summary = head(finished) | {"caveats": list(dict.fromkeys(said))}
        for found in findings:
            summary |= found.summary
        if finished.noise is not None:
            summary["machine_noise"] = finished.noise.summary()
        if self.saturation is not None:
            summary["saturation"] = asdict(self.saturation)
        return summary

    def _write(self, summary: dict[str, Any], tables: list[Table]) -> None:
        text = orjson.dumps(summary, option=orjson.OPT_INDENT_2) + b"\n"
        (self.folder.work / "summary.json").write_bytes(text)
        faces.write(tables, self.folder.work)

    def _draw(self, arms: Arms, findings: list[Findings]) -> list[Path]:
        """Every figure, on the processes that ran the arms; returns the images."""
        folder = self.folder.work / "figures"
        drawn = {name: draw for found in findings for name, draw in found.figures.items()}
        jobs = [arms.submit(_draw_one, draw, folder / name) for name, draw in drawn.items()]
        return [path for job in as_completed(jobs) for path in arms.result(job) if path.suffix == ".png"]


def _engine_facts(worker: Worker) -> EngineFacts:
    return engine_facts(worker.study)


def _draw_one(worker: Worker, draw: Callable[[], Figure | None], stem: Path) -> list[Path]:
    from spanlab.report.drawing.write import write_figure  # matplotlib: half a second that only drawing needs

    return write_figure(draw, stem)

"""One study from settings to report."""

from __future__ import annotations

import time
from concurrent.futures import as_completed
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from spanlab import build
from spanlab.core.request import Request
from spanlab.fidelity import clean
from spanlab.fidelity.replay import design_for
from spanlab.report.data import StudyData
from spanlab.report.figures import FIGURES
from spanlab.report.table import print_table
from spanlab.settings import Study, worker_count
from spanlab.study import checks, provenance, results, turns
from spanlab.study.aa import noise_of, readings_of, repeat_files, told
from spanlab.study.backends import BACKENDS, Backend
from spanlab.study.cells import ArmFiles, cells
from spanlab.study.config import as_yaml
from spanlab.study.device import GETTING_IT, OPTIONAL, EngineFacts, engine_facts
from spanlab.study.folder import RunFolder
from spanlab.study.pool import ArmPool, pool
from spanlab.study.progress import ArmProgress, say
from spanlab.tracking import Tracker, tracked
from spanlab.workloads import Workload
from spanlab_sim.calibrated import Profile


def run_study(study: Study, name: str, root: Path, show: bool = True) -> Path:
    """Run a study and leave its folder; returns the folder.

    `name` is the entry's, `root` where outputs go; `show` prints the table.
    """
    started = time.perf_counter()
    console = Console(stderr=True)
    checks.check_packages(study)
    checks.check_pools(study)
    workload = build.build_workload(study.workload, str(root / ".cache"))
    say(console, f"{name} · {workload.name} · {workload.provenance.line()}")
    checks.check_memory(study)
    checks.check_fit(study, workload.requests)
    checks.check_marks(study, workload.requests)
    checks.check_learning(study, workload.requests)
    config = asdict(study)
    run, names = study.output.run or name, study.chosen()
    with (
        RunFolder(root, study.workload.kind, run, study.output.if_exists, as_yaml(config, workload.requests)) as folder,
        pool(study, workload.requests, _rows(study), worker_count(study, len(names))) as arms,
    ):
        facts = _look_at_device(study, arms, console)
        files = {arm: _files(folder, arm) for arm in names}
        again = repeat_files(folder.work) if BACKENDS[study.backend].in_turns else None
        arms.on_backend(partial(_warm_up, requests=workload.requests))
        profile = _profile(study, workload, arms, root)
        running = arms.start(turns.tasks(study, files, again))
        with tracked(study.tracking, run, name, config, folder.work) as tracker:
            with ArmProgress(_totals(study, len(workload.requests)), console) as progress:
                ends = arms.finish(running, progress.show, 0.2)
            outcome = results.Outcome.of(ends[: len(names)], facts)
            data, summary = results.compare(study, name, workload, outcome)
            if again is not None:
                data = told(data, summary, noise_of(study, files[turns.repeated(study)], again))
            shown = Console() if console.is_terminal else Console(width=160)
            if show:
                print_table(data, shown)
            if study.output.figures:
                _draw(data, folder.work / "figures", arms, tracker)
            if profile is not None:
                ran = {arm: files[arm] for arm in names if arm not in outcome.failed}
                gap = clean.compare_run(study, workload.requests, ran, profile, folder.work / "simulated")
                summary["fidelity"] = _tell(gap, study, data, shown, folder.work / "figures", tracker)
            summary |= provenance.run_facts(time.perf_counter() - started, provenance.PACKAGES_OF[study.backend])
            (folder.work / "summary.json").write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2) + b"\n")
            tracker.summary(summary)
            tracker.table("arms", *results.flat_table(summary))
        folder.finish()
    say(console, str(folder.path))
    results.raise_failures(outcome.failed, len(names))
    return folder.path


def _files(folder: RunFolder, arm: str) -> ArmFiles:
    return ArmFiles(folder.records(arm), folder.runs(arm), folder.steps, readings_of(folder.work))


def _warm_up(backend: Backend, requests: tuple[Request, ...]) -> None:
    backend.warm_up(requests)


def _look_at_device(study: Study, arms: ArmPool, console: Console) -> EngineFacts | None:
    """What the engine will run on, asked where it will; refuse a store that it has no room for."""
    if study.backend != "engine":
        return None
    facts = arms.executor.submit(engine_facts, study).result()
    checks.check_device(study, facts)
    if study.model.is_hybrid and facts.kind == "cuda" and OPTIONAL not in facts.versions:
        say(console, f"{OPTIONAL} is not installed: recurrent layers take transformers' own slower path; {GETTING_IT}")
    return facts


def _profile(study: Study, workload: Workload, arms: ArmPool, root: Path) -> Profile | None:
    """The timing model by which an engine study says how well it is predicted; None where nobody asks."""
    if not study.fidelity.wanted(study.backend):
        return None
    return arms.on_backend(partial(clean.make_profile, study, design_for(study, workload.requests), root))


def _tell(
    gap: clean.Comparison, study: Study, data: StudyData, shown: Console, folder: Path, tracker: Tracker
) -> dict[str, Any]:
    """How well the simulator predicts the study: a table, a figure, and what goes into the summary."""
    shown.print("", gap.table())
    if study.output.figures:
        tracker.figures(gap.draw(f"{data.title} · {data.footer}", folder))
    return gap.summary()


def _rows(study: Study) -> int:
    return len(study.chosen()) + BACKENDS[study.backend].in_turns


def _totals(study: Study, asked: int) -> dict[str, int]:
    """Requests to finish, by arm, and by the repeated baseline where there is one."""
    drawn = study.workload.popularity.requests or asked
    rows = {arm: arm for arm in study.chosen()}
    if BACKENDS[study.backend].in_turns:
        rows[turns.AGAIN] = turns.repeated(study)
    return {row: drawn * len(cells(study, arm)) for row, arm in rows.items()}


def _draw(data: StudyData, folder: Path, arms: ArmPool, tracker: Tracker) -> None:
    """Every figure, on the processes that ran the arms; each is tracked while others are still being drawn."""
    for job in as_completed([arms.executor.submit(_draw_one, data, name, folder) for name in FIGURES]):
        tracker.figures([path for path in job.result() if path.suffix == ".png"])


def _draw_one(data: StudyData, name: str, folder: Path) -> list[Path]:
    from spanlab.report.write import draw_one  # matplotlib: half a second that only drawing needs

    return draw_one(data, name, folder)

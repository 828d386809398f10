"""One study from settings to report."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from omegaconf import OmegaConf
from rich.console import Console

from spanlab import build
from spanlab.report.data import StudyData
from spanlab.report.figures import FIGURES
from spanlab.report.table import print_table
from spanlab.report.write import draw_one
from spanlab.settings import Study, worker_count
from spanlab.study import provenance, results
from spanlab.study.cells import ArmFiles, cells
from spanlab.study.folder import RunFolder
from spanlab.study.pool import ArmPool, pool
from spanlab.study.progress import ArmProgress
from spanlab.tracking import Tracker, tracked

# Settings that say where and how a run is done, not what comes out of it: a run may be resumed with others.
_INCIDENTAL = ("output", "tracking", "workers")


def run_study(study: Study, name: str, root: Path) -> Path:
    """Run a study and leave its folder; returns the folder. `name` is the entry's, `root` where outputs go."""
    started = time.perf_counter()
    console = Console(stderr=True)
    workload = build.build_workload(study.workload, str(root / ".cache"))
    console.print(f"[bold]{name}[/] {workload.name}: {workload.provenance.line()}", highlight=False)
    build.check_fit(study, workload.requests)
    config = asdict(study)
    folder = RunFolder(root, study.workload.kind, study.output.run or name, study.output.if_exists, _yaml(config))
    names = study.chosen()
    with (
        tracked(study.tracking, study.output.run or name, name, config, folder.work) as tracker,
        pool(study, workload.requests, len(names), worker_count(study, len(names))) as arms,
    ):
        _run_arms(study, names, folder, arms, len(workload.requests), console)
        data, summary = results.gather(study, name, folder, workload)
        print_table(data, Console())
        figures = _draw(data, folder.work / "figures", arms) if study.output.figures else []
        summary |= provenance.run_facts(time.perf_counter() - started)
        (folder.work / "summary.json").write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2) + b"\n")
        _track(tracker, summary, figures)
    folder.finish()
    console.print(f"{folder.path}", highlight=False)
    return folder.path


def _yaml(config: dict[str, Any]) -> str:
    kept = {key: value for key, value in config.items() if key not in _INCIDENTAL}
    return OmegaConf.to_yaml(OmegaConf.create(kept))


def _run_arms(study: Study, names: list[str], folder: RunFolder, arms: ArmPool, asked: int, console: Console) -> None:
    drawn = study.workload.popularity.requests or asked
    jobs = [(name, ArmFiles(folder.records(name), folder.runs(name))) for name in names]
    totals = {name: drawn * len(cells(study, name)) for name in names}
    with ArmProgress(totals, console) as progress:
        arms.run(jobs, progress.show, 0.2)


def _draw(data: StudyData, folder: Path, arms: ArmPool) -> list[Path]:
    """Every figure, on the processes that ran the arms; returns the PNG files."""
    jobs = [arms.executor.submit(draw_one, data, name, folder) for name in FIGURES]
    return [path for job in jobs for path in job.result() if path.suffix == ".png"]


def _track(tracker: Tracker, summary: dict[str, Any], figures: list[Path]) -> None:
    columns, rows = results.flat_table(summary)
    tracker.summary(summary)
    tracker.table("arms", columns, rows)
    tracker.figures(figures)

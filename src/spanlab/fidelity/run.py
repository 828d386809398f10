"""A study of the simulator itself: the engine at several loads, repeated, and the simulator's answer to the same."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from spanlab import build
from spanlab.bench.machine import progress
from spanlab.fidelity.cells import Cell, Files, in_order
from spanlab.fidelity.measure import Bench, Saturation
from spanlab.fidelity.replay import Trace, design_for
from spanlab.fidelity.report import Ground, Report
from spanlab.fidelity.rounds import Rounds
from spanlab.settings import Study
from spanlab.study import checks, provenance
from spanlab.study.backends import RealEngine
from spanlab.study.config import as_yaml
from spanlab.study.device import engine_facts
from spanlab.study.folder import RunFolder
from spanlab.study.progress import say
from spanlab.study.results import WAY_OUT, raise_failures
from spanlab.tracking import tracked
from spanlab.workloads import Workload


def run_fidelity(study: Study, name: str, root: Path) -> Path:
    """Run the comparison and leave its folder; returns the folder. `name` is the entry's, `root` where outputs go."""
    started = time.perf_counter()
    console = Console(stderr=True)
    checks.check_packages(study)
    workload = build.build_workload(study.workload, str(root / ".cache"))
    say(console, f"{name} · {workload.name} · {workload.provenance.line()}")
    facts = engine_facts(study)
    _check(study, workload)
    checks.check_device(study, facts)
    config, run = asdict(study), study.output.run or name
    made_of = as_yaml(config, workload.requests)
    with (
        RunFolder(root, study.workload.kind, run, study.output.if_exists, made_of) as folder,
        tracked(study.tracking, run, name, config, folder.work) as tracker,
    ):
        ground, failed = _measured(study, workload, Files(folder.work), console)
        report = Report(study, name, workload, facts, ground, failed)
        run_facts = provenance.run_facts(time.perf_counter() - started, provenance.PACKAGES_OF["engine"])
        report.leave(run_facts, tracker)
        folder.finish()
    say(console, str(folder.path))
    raise_failures(failed, len(study.chosen()))
    return folder.path


def _check(study: Study, workload: Workload) -> None:
    checks.check_memory(study)
    checks.check_fit(study, workload.requests)
    checks.check_marks(study, workload.requests)
    checks.check_learning(study, workload.requests)


def _measured(study: Study, workload: Workload, files: Files, console: Console) -> tuple[Ground, dict[str, str]]:
    """Everything that takes the engine; and a sentence for each arm that failed."""
    engine = RealEngine(study)
    rounds = Rounds(study, engine.model, design_for(study, workload.requests), files.folder, console)
    bench = Bench(study, engine, files)
    unpaced = Trace.of(study, workload.requests, study.seeds[0], study.arrivals.rate_rps)
    repeats = in_order(study.chosen(), study.fidelity.shares, study.fidelity.repeats, study.seeds[0])
    if not all(files.records(cell).exists() for cells in repeats for cell in cells):
        bench.warm_up(unpaced)
    saturation = bench.saturation(unpaced)
    words = f"{saturation.arm} serves {saturation.rate_rps:.3g} requests/s when all {saturation.requests} are there"
    say(console, f"{words}; loads are shares of that")
    traces = {share: _paced(study, workload, saturation, share) for share in study.fidelity.shares}
    failed: dict[str, str] = {}
    for number, cells in enumerate(repeats):
        rounds.measure(number)
        failed |= _run(bench, [cell for cell in cells if cell.arm not in failed], traces, console)
    rounds.measure(len(repeats))
    if len(failed) == len(study.chosen()):
        raise ValueError(f"no arm ran to its end, the first for this: {next(iter(failed.values()))}; {WAY_OUT}")
    profile = rounds.profile(len(repeats) + 1)
    profile.write(files.folder / "profile.json")
    return Ground(files, saturation, traces, profile), failed


def _paced(study: Study, workload: Workload, saturation: Saturation, share: float) -> Trace:
    """The same arrivals for every arm, repeat and backend: one sample path, stretched to the load."""
    return Trace.of(study, workload.requests, study.seeds[0], share * saturation.rate_rps)


def _run(bench: Bench, cells: list[Cell], traces: dict[float, Trace], console: Console) -> dict[str, str]:
    """One repeat of every cell, in the order given; an arm that runs out of memory is not tried again."""
    failed: dict[str, str] = {}
    with progress(console) as bars:
        task = bars.add_task("engine", total=sum(len(traces[cell.share].requests) for cell in cells))
        for done, cell in enumerate(cells):
            if cell.arm in failed:
                continue
            bars.update(task, description=f"{cell.arm}, load {cell.share:g}, repeat {cell.repeat}")
            sentence = bench.measure(cell, traces[cell.share], lambda: bars.advance(task))
            if sentence is not None:
                failed[cell.arm] = sentence
            bars.update(task, completed=sum(len(traces[one.share].requests) for one in cells[: done + 1]))
    return failed

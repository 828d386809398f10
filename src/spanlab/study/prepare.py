"""Load and check the workload of a study before any run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from spanlab import build
from spanlab.plugins import load_plugins
from spanlab.settings import Study, WorkloadSettings
from spanlab.settings.analyses import DESIGNED, LOG_CHECKS
from spanlab.study import checks
from spanlab.study.fidelity.shapes import designed_workload
from spanlab.study.given_answers import with_given_answers
from spanlab.study.progress import print_line
from spanlab.tracking import check_login
from spanlab.workloads import Workload

LoadFunction = Callable[[WorkloadSettings, str, bool], Workload]


def check_and_load(study: Study, name: str, root: Path, console: Console, load: LoadFunction) -> Workload:
    """Check packages, login and settings, and return the workload."""
    load_plugins(study.plugins)
    checks.check_packages(study)
    check_login(study.tracking)
    return load_workload(study, name, root, console, load)


def load_workload(
    study: Study, name: str, root: Path, console: Console, load: LoadFunction = build.build_workload
) -> Workload:
    """Check the settings and return the workload; this needs no package of the engine."""
    checks.check_pools(study)
    designed = study.workload.kind == DESIGNED
    cache = str(root / ".cache")
    workload = designed_workload(study) if designed else load(study.workload, cache, study.serves)
    workload = with_given_answers(study, workload)
    print_line(console, f"{name} · {workload.name} · {workload.provenance.line()}")
    if not study.serves:
        for analysis in study.chosen_analyses():
            if analysis in LOG_CHECKS:
                LOG_CHECKS[analysis](study, workload.log)
        return workload
    if (note := checks.arrival_note(study, workload.requests)) is not None:
        print_line(console, note)
    checks.check_memory(study)
    checks.check_fit(study, workload.requests)
    checks.check_boundaries(study, workload.requests)
    checks.check_passages(study, workload.requests)
    checks.check_streams(study, workload.requests)
    checks.check_learning(study, workload.requests)
    if not designed:
        build.build_arrivals(study, workload.requests, study.seeds[0], study.arrivals.rate_rps)
    return workload

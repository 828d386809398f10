"""The workload of a study, made and checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from spanlab import build
from spanlab.plugins import load_plugins
from spanlab.settings import Study, WorkloadSettings
from spanlab.settings.analyses import DESIGNED
from spanlab.study import checks
from spanlab.study.fidelity.shapes import designed_workload
from spanlab.study.given_answers import with_given_answers
from spanlab.study.progress import say
from spanlab.tracking import check_login
from spanlab.workloads import Workload

Load = Callable[[WorkloadSettings, str, bool], Workload]


def checked(study: Study, name: str, root: Path, console: Console, load: Load) -> Workload:
    """The workload, once nothing speaks against the study."""
    load_plugins(study.plugins)
    checks.check_packages(study)
    check_login(study.tracking)
    return prepared(study, name, root, console, load)


def prepared(study: Study, name: str, root: Path, console: Console, load: Load = build.build_workload) -> Workload:
    """The workload, once no check of the settings speaks against the study; needs no package of the engine."""
    checks.check_pools(study)
    designed = study.workload.kind == DESIGNED
    cache = str(root / ".cache")
    workload = designed_workload(study) if designed else load(study.workload, cache, study.serves)
    workload = with_given_answers(study, workload)
    say(console, f"{name} · {workload.name} · {workload.provenance.line()}")
    if not study.serves:
        return workload
    if (note := checks.note_on_times(study, workload.requests)) is not None:
        say(console, note)
    checks.check_memory(study)
    checks.check_fit(study, workload.requests)
    checks.check_marks(study, workload.requests)
    checks.check_passages(study, workload.requests)
    checks.check_streams(study, workload.requests)
    checks.check_learning(study, workload.requests)
    return workload

"""A small run on the engine with its step log, which many tests replay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from spanlab import build
from spanlab.main import compose
from spanlab.settings import Study
from spanlab.study.step_log import LoggedStep, read_steps

SMALL = (
    "workload.documents=2",
    "workload.questions_per_document=3",
    "workload.rag.requests=null",
    "workload.output_tokens=4",
    "only=[none,cache_blend_15]",
    "engine.threads=1",
    "tracking=none",
    "output.figures=false",
)


@dataclass(frozen=True)
class Run:
    """One arm's run: what was asked, and what the engine did."""

    study: Study
    trace: object
    log: list[LoggedStep]
    records: Path


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Run:
    """An arm that copies, fills and repairs, at a load that lets the engine idle now and then."""
    pytest.importorskip("torch")
    from spanlab.fidelity.cells import Cell, Files
    from spanlab.fidelity.measure import Bench
    from spanlab.fidelity.replay import Trace
    from spanlab.study.backends import RealEngine

    study = compose("pic_clean", [*SMALL])
    folder = tmp_path_factory.mktemp("measured")
    workload = build.build_workload(study.workload, str(folder / "cache"))
    trace = Trace.of(study, workload.requests, 0, 1.0)
    at_ms = (1, 1, 5, 60, 2000, 2001)
    paced = [replace(one, arrived_at=at * 10**6) for one, at in zip(trace.requests, at_ms, strict=True)]
    trace, files, cell = replace(trace, requests=paced), Files(folder), Cell("cache_blend_15", 0.5, 0)
    assert Bench(study, RealEngine(study), files).measure(cell, trace, lambda: None) is None
    return Run(study, trace, read_steps(files.steps(cell)), files.records(cell))

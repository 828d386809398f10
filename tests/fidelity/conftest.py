"""A small run on the engine with its step log, which many tests replay."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from spanlab.calibrate import profiles

from spanlab import build
from spanlab.main import compose
from spanlab.settings import Study
from spanlab.study.step_log import LoggedStep, StepLog, read_steps

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


class Creeping:
    """The engine, whose steps take longer and longer by amounts that are always the same."""

    STEP_NS, CREEP_NS = 20_000_000, 900

    def __init__(self, engine) -> None:
        self._engine, self._steps = engine, 0
        self.resume, self.completed, self.close = engine.resume, engine.completed, engine.close

    def execute(self, step, deadline_ns):
        self._steps += 1
        duration = self.STEP_NS + self._steps * self.CREEP_NS
        return replace(self._engine.execute(step, deadline_ns), duration_ns=duration)


@pytest.fixture(autouse=True)
def any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles are kept, however busy the machine of the tests is."""
    monkeypatch.setattr(profiles, "LEFT_OUT_LIMIT", float("inf"))


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Run:
    """An arm that copies, fills and repairs; some requests come together, some find the engine idle."""
    pytest.importorskip("torch")
    from spanlab.fidelity.replay import Trace

    from spanlab_sim.run import serve

    study = compose("pic_clean", [*SMALL])
    folder = tmp_path_factory.mktemp("measured")
    workload = build.build_workload(study.workload, str(folder / "cache"))
    trace = Trace.of(study, workload.requests, 0, 1.0)
    at_ms = (1, 1, 5, 60, 2000, 2001)
    paced = [replace(one, arrived_at=at * 10**6) for one, at in zip(trace.requests, at_ms, strict=True)]
    trace, arm = replace(trace, requests=paced), "cache_blend_15"
    policy = trace.policy(study, arm)
    engine = build.build_engine(study, study.arms[arm], build.build_model(study), policy, paced)
    with StepLog(folder / "steps.jsonl", policy, build.build_span_reads(study.arms[arm])) as log:
        rules = build.build_rules(study)
        serve(paced, policy, rules, Creeping(engine), lambda record: None, on_step=log.ran)
    return Run(study, trace, read_steps(folder / "steps.jsonl"))

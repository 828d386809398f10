"""With the engine's step times, the simulator composes the engine's steps, and detects a log of another run."""

from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

pytest.importorskip("torch")

from spanlab.analyses.fidelity import ScheduleMatch, schedule_match
from spanlab.build import build_engine, build_model, build_policy, build_span_reads, build_workload
from spanlab.cli import compose
from spanlab.core.request import Request
from spanlab.engine.settings import remap_tokens
from spanlab.settings import Study
from spanlab.study.jobs import build_arrivals
from spanlab.study.logs import LoggedStep, StepLog, read_steps
from spanlab_sim.run import serve

ARM = "cache_blend_15"
SMALL = (
    "workload.documents=2",
    "workload.questions_per_document=3",
    "workload.rag.requests=null",
    "workload.output_tokens=4",
    "only=[none,cache_blend_15]",
    "engine.threads=1",
    "tracking.kind=none",
    "output.figures=false",
)


@dataclass(frozen=True)
class Run:
    """One arm's run: its requests, and the engine's steps."""

    study: Study
    requests: list[Request]
    log: list[LoggedStep]

    def policy(self):
        """A new policy of the arm."""
        longest = max(request.num_tokens for request in self.requests)
        return build_policy(self.study, self.study.arms[ARM], 0, longest)


class Creeping:
    """The engine, with step times that increase by fixed amounts."""

    STEP_NS, CREEP_NS = 20_000_000, 900

    def __init__(self, engine) -> None:
        self._engine, self._steps = engine, 0
        self.resume, self.completed, self.close = engine.resume, engine.completed, engine.close

    def execute(self, step, deadline_ns):
        self._steps += 1
        duration = self.STEP_NS + self._steps * self.CREEP_NS
        return replace(self._engine.execute(step, deadline_ns), duration_ns=duration)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """An arm that copies, fills and repairs; some requests come together, some find the engine idle."""
    study = compose("pic_clean", [*SMALL])
    folder = tmp_path_factory.mktemp("measured")
    workload = build_workload(study.workload, str(folder / "cache"))
    arrived = build_arrivals(study, workload.requests, 0, 1.0)
    at_ms = (1, 1, 5, 60, 2000, 2001)
    fitted = remap_tokens(arrived, study.model.vocab_size)
    paced = [replace(request, arrived_at=time_ms * 10**6) for request, time_ms in zip(fitted, at_ms, strict=True)]
    engine_run = Run(study, paced, [])
    policy, strategy = engine_run.policy(), study.arms[ARM]
    engine = build_engine(study, strategy, build_model(study), policy, paced)
    with closing(StepLog(folder / "steps.jsonl", policy, build_span_reads(strategy))) as log:
        rules = study.batch
        serve(paced, policy, rules, Creeping(engine), lambda record: None, on_step=log.ran)
    return replace(engine_run, log=read_steps(folder / "steps.jsonl"))


def share(run: Run, log: list[LoggedStep], requests: list[Request] | None = None) -> ScheduleMatch:
    return schedule_match(requests or run.requests, run.policy(), run.study.batch, log)


def test_every_step_of_the_engine_is_composed_alike(run):
    match = share(run, run.log)
    assert match == (len(run.log), len(run.log), None)
    assert match.share == 1.0
    idled = sum(before.ended_ns < after.started_ns for before, after in pairwise(run.log))
    assert idled, "the engine never idled, and the test says little"
    assert any(step.features.copied_tokens for step in run.log)


def test_a_missing_or_further_step_is_reported(run):
    match = share(run, run.log[:-1])
    assert (match.equal, match.steps) == (len(run.log) - 1, len(run.log) - 1)
    assert match.difference.startswith(f"step {len(run.log) - 1}: the engine had finished, the simulator decodes for ")
    match = share(run, [*run.log, run.log[-1]])
    assert match.equal == len(run.log)
    assert match.difference.endswith("the simulator had finished")
    assert match.share < 1.0


def test_another_composition_ends_the_comparison(run):
    index = next(number for number, step in enumerate(run.log) if step.key[0] and number)
    (request, start, stop, *chunk_end), *others = run.log[index].key[0]
    key = (((request, start, stop - 1, *chunk_end), *others), *run.log[index].key[1:])
    match = share(run, [*run.log[:index], replace(run.log[index], key=key), *run.log[index + 1 :]])
    assert match.equal == index
    says = f"[{start}, {{}}) of request {request}"
    message = f"the engine computes {says.format(stop - 1)}, the simulator computes {says.format(stop)}"
    assert match.difference == f"step {index}: {message}"


def test_an_equal_step_at_another_time_is_reported(run):
    """If eviction depends on age, times decide which entries remain."""
    index = len(run.log) // 2
    log = [*run.log[:index], replace(run.log[index], started_ns=run.log[index].started_ns + 1), *run.log[index + 1 :]]
    match = share(run, log)
    assert match.equal == index
    assert match.difference.startswith(f"step {index}: the engine began it 1 ns later")


def test_other_arrivals_give_other_steps(run):
    """Who comes between two decisions depends on when they are: parity holds for the measured times alone."""
    together = [replace(request, arrived_at=run.requests[0].arrived_at) for request in run.requests]
    assert share(run, run.log, together).share < 1.0

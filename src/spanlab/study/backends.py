"""Backends that run one job; policy, scheduler and record types are the same for simulator and
engine."""

from __future__ import annotations

import functools
import gc
import os
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from spanlab.build import (
    build_engine,
    build_model,
    build_passages,
    build_policy,
    build_route,
    build_span_reads,
    build_tiered,
    build_timing,
)
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request
from spanlab.core.step import ScheduledStep, StepResult
from spanlab.records import Record, RunRow
from spanlab.settings.analyses import PLAIN
from spanlab.settings.study import Study
from spanlab.study.jobs import Backend, Job, RunLogs, Running, warm_requests
from spanlab.study.logs import StepLog
from spanlab.study.machine import FixedStep, record_reading, release_memory
from spanlab.study.numbers import read_outputs
from spanlab.study.real_server import RemoteServer
from spanlab_sim.run import Run, RunSpec, modelled


@contextmanager
def _infrequent_gc() -> Iterator[None]:
    """Collect garbage every million allocations instead of 700, and only among objects of the run.

    A simulation allocates trees, which stay alive; older objects, such as the requests, stay alive
    longer.
    """
    usual = gc.get_threshold()
    gc.set_threshold(1_000_000, *usual[1:])
    gc.freeze()
    try:
        yield
    finally:
        # The nodes of a run's trees refer to each other. Those of a large run are freed before the
        # bounds need the memory. Those of small runs wait until a million objects were allocated.
        if any(gc.get_count()[1:]):  # the collector has run since its last whole collection
            gc.collect()
        gc.unfreeze()
        gc.set_threshold(*usual)


class Simulator(Backend):
    """Backend `sim`: step durations come from the timing model."""

    def run(self, job: Job, write: Callable[[Record], None]) -> Running:
        """Run `simulate`, without pauses."""
        yield from ()
        return self.simulate(job, write)

    @_infrequent_gc()
    def simulate(self, job: Job, write: Callable[[Record], None]) -> RunRow:
        """Simulate one run."""
        from spanlab.core.policies.tiered import tiered_record, tiered_row
        from spanlab_sim.run import DemandMeter
        from spanlab_sim.timings import CalibratedTiming

        timing, rules = build_timing(self._study), job.rules
        meter = DemandMeter(timing)
        strategy, count = job.strategy, self._study.replicas.count
        job_sizes = job.warmup, job.max_tokens, job.requests
        policies = [build_policy(self._study, strategy, *job_sizes) for _ in range(count)]
        tiered = build_tiered(self._study, strategy, policies[0], rules)

        def finished(record: Record) -> None:
            meter.finished(record)
            logs.finished(record)
            write(record if tiered is None else tiered_record(record, tiered))

        with RunLogs(job, policies[0].store) as logs:
            served = policies if tiered is None else [tiered]
            row = Run(
                _spec(job, job.requests),
                modelled(served, rules, logs.timing(meter), reads=build_span_reads(job.strategy)),
                finished,
                on_step=logs.ran,
                route=build_route(self._study, job.seed),
                loads=tiered,
            ).serve()
        if tiered is not None:
            row = tiered_row(row, tiered)
        if isinstance(timing, CalibratedTiming):
            row.beyond.update(timing.extrapolated)
        return replace(row, demand_s=meter.demand_s(rules))


class RealEngine(Backend):
    """Backend `engine`: step durations are measured on the device; arrivals follow the clock
    `engine.clock`."""

    interleaved = True

    def __init__(self, study: Study, shared: RealEngine | None = None) -> None:
        super().__init__(study)
        self._shared = shared

    @functools.cached_property
    def model(self) -> Any:
        """Model on its device, loaded at first use, or the model of `shared`."""
        return build_model(self._study) if self._shared is None else self._shared.model

    @functools.cached_property
    def _plain(self) -> Any:
        """The same weights as a model of transformers with torch's fused attention."""
        from spanlab.engine.oracle import twin_of

        return twin_of(self.model, "sdpa")

    @functools.cached_property
    def _fixed(self) -> FixedStep:
        return FixedStep(self._study.model, self._study.engine, self.model)

    def run(self, job: Job, write: Callable[[Record], None]) -> Running:
        """Run one job from an empty cache; before it, append a reading of the machine to
        `job.readings`."""
        release_memory()  # the pools of the previous run are in a reference cycle
        if job.readings is not None:
            self.record_reading(job.readings)
        return (yield from self._serve(job, write, self._study.engine.clock))

    def record_reading(self, path: Path) -> None:
        """Append a reading of the machine to `path`."""
        record_reading(path, self._fixed.measure)

    def warm_up(self, requests: Ordered[Request]) -> None:
        """Serve a few requests with every arm of the study from an empty cache, without records or
        logs."""
        study, selected = self._study, warm_requests(requests)
        longest = max(request.num_tokens for request in requests)
        of_run = selected, study.batch, 0, None, 0, longest, 0, Path(os.devnull)
        jobs = [Job(study.arms[arm], *of_run) for arm in study.chosen()]
        jobs += [jobs[0].in_plain_transformers()] if study.needs(PLAIN) else []
        for job in jobs:
            deque(self._serve(job, lambda record: None, "virtual"), maxlen=0)
            release_memory()

    def _serve(self, job: Job, write: Callable[[Record], None], clock: str) -> Running:
        from spanlab.engine.outputs import Recording, Scorer
        from spanlab.engine.plain import PlainForward

        policy = build_policy(self._study, job.strategy, job.warmup, job.max_tokens, job.requests)
        assert isinstance(policy, TreePolicy), "the engine runs the policy `tree` only"
        requests = self._with_teacher_outputs(self.served(job.requests), job.teacher)
        scorer = None
        if job.logits is not None:
            scorer = Scorer(requests, self.model.vocab_size, job.logits, job.reference)
        recording = Recording(self._study.engine.record, scorer)
        callbacks = {
            "on_logits": recording.note,
            "on_finished": recording.finished,
            "at_once": scorer is not None,
        }
        engine = (
            PlainForward(self._plain)
            if job.plain
            else build_engine(self._study, job.strategy, self.model, policy, requests, **callbacks)
        )
        if job.touched:
            assert not isinstance(engine, PlainForward), "calibrations run arms alone"
            # write to all memory, as in a store that has been full once
            for layer in range(engine.pool.shape.layers):
                engine.pool.keys(layer).zero_()
                engine.pool.values(layer).zero_()
            if engine.memory is not None:
                tokens, states = sum(r.num_tokens for r in requests), engine.memory.states.pool
                used = tokens // self._study.model.grid + 2 * len(requests)
                states.free([states.allocate() for _ in range(used)])

        def ran(step: ScheduledStep, now: int, result: StepResult) -> None:
            log.ran(step, now, result)
            logs.ran(step, now, result)

        def finished(record: Record) -> None:
            logs.finished(record)
            write(record)

        reads = build_span_reads(job.strategy)
        with closing(StepLog(job.steps, policy, reads)) as log, RunLogs(job, policy.store) as logs:
            spec = replace(_spec(job, requests), clock=clock, seen=None)
            row = yield from Run(spec, [(policy, engine)], finished, on_step=ran).serving()
        if job.outputs is not None:
            recording.write(job.outputs, engine.outputs)
        return row

    @staticmethod
    def _with_teacher_outputs(requests: Ordered[Request], teacher: Path | None) -> Ordered[Request]:
        """Return the requests with the outputs of the teacher's run; the engine generates these
        tokens."""
        if teacher is None:
            return requests
        outputs = read_outputs(teacher).tokens
        return [
            replace(request, output=outputs[request.id], output_len=len(outputs[request.id]))
            for request in requests
        ]

    def served(self, requests: Ordered[Request]) -> Ordered[Request]:
        """Return the requests with token ids of the model's vocabulary."""
        from spanlab.engine.settings import remap_tokens

        return remap_tokens(requests, self.model.vocab_size)

    def recover(self) -> None:
        """Release device memory; the model stays loaded."""
        release_memory()


BACKENDS: dict[str, type[Backend]] = {
    "sim": Simulator,
    "engine": RealEngine,
    "server": RemoteServer,
}


def _spec(job: Job, requests: Ordered[Request]) -> RunSpec:
    return RunSpec(
        requests,
        job.rules,
        seed=job.seed,
        rate_rps=job.rate_rps,
        warmup=job.warmup,
        group=job.group,
        clients=job.clients,
        passages=build_passages(job.strategy),
        seen=job.seen,
    )

"""Shapes through the scheduler, the policy and the engine that studies run, and the time of every step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from spanlab import build
from spanlab.calibrate.points import Place, Point
from spanlab.calibrate.shapes import Shape
from spanlab.core.scheduler import BatchRules
from spanlab.engine.engine import Engine
from spanlab.model_spec import ModelSpec
from spanlab.settings import BatchSettings, EngineSettings, StoreSettings, Strategy
from spanlab.study.step_log import StepLog, read_steps
from spanlab.study.warm_up import Serve
from spanlab_sim.run import serve


@dataclass(frozen=True)
class Bench:
    """What the makers of policies and engines read of a study: without limits, since a shape must fit."""

    model: ModelSpec
    batch: BatchSettings
    engine: EngineSettings
    store: StoreSettings


def measure(
    study: Any,
    model: Any,
    shapes: Sequence[Shape],
    seed: int,
    number: int,
    done: Callable[[], None] = lambda: None,
) -> list[Point]:
    """One round: every shape once from an empty cache, in an order that is this round's own.

    `study` has a model, a batch, an engine and arms, and is warm; `done` is called after each shape.
    """
    bench = Bench(study.model, study.batch, study.engine, StoreSettings())
    found = []
    for at in np.random.default_rng([seed, number]).permutation(len(shapes)).tolist():
        found += _run(bench, study.arms, model, at, shapes[at])
        done()
    return sorted(found, key=lambda point: point.place)


def serve_shape(study: Any, model: Any, rules: BatchRules) -> Serve:
    """How a warm-up serves requests as shapes are: the runs are as those that are measured."""
    virtual = replace(study.engine, clock="virtual")  # the waves of a warm-up are far apart
    bench = Bench(study.model, study.batch, virtual, StoreSettings())
    return lambda arm, asked: _run(bench, study.arms, model, 0, Shape(arm, rules, (tuple(asked),)))


def _run(bench: Bench, arms: dict[str, Strategy], model: Any, number: int, shape: Shape) -> list[Point]:
    """Every step of one run of a shape."""
    requests, strategy = shape.requests, arms[shape.arm]
    # builders take studies, of which they read no more than this
    whole: Any = bench
    policy = build.build_policy(whole, strategy, 0, max(request.num_tokens for request in requests))
    engine = build.build_engine(whole, strategy, model, policy, requests)
    _warm(engine, sum(request.num_tokens for request in requests) // bench.model.grid + 2 * len(requests))
    found = []
    for wave_number, wave in enumerate(shape.waves):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "steps.jsonl"
            reads = build.build_span_reads(strategy)
            # written while it runs, as in a study: that is part of a step's cost
            with StepLog(path, policy, reads) as log:
                serve(wave, policy, shape.rules, engine, _forget, clock=bench.engine.clock, on_step=log.ran)
            logged = read_steps(path)
        for at, step in enumerate(logged):
            found.append(Point(Place(number, wave_number, at), shape.arm, step.features, (step.took_ns,)))
    return found


def _warm(engine: Engine, states: int) -> None:
    """Touch the memory of KV and states: a store that has been full once, as a study's soon is, has no new pages."""
    for layer in range(engine.pool.shape.layers):
        engine.pool.keys(layer).zero_()
        engine.pool.values(layer).zero_()
    if engine.states is not None:
        pool = engine.states.pool
        pool.give([pool.take() for _ in range(states)])


def _forget(record: object) -> None:
    """Records are not what is measured."""

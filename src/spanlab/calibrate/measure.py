"""Shapes through the scheduler, the policy and the engine that studies run, and the time of every step."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from spanlab import build
from spanlab.calibrate.shapes import Shape
from spanlab.engine.clock import WallClock
from spanlab.engine.engine import Engine
from spanlab.engine.serve import serve
from spanlab.model_spec import ModelSpec
from spanlab.settings import BatchSettings, EngineSettings, StoreSettings, Strategy
from spanlab.study.step_log import LoggedStep, StepLog, read_steps
from spanlab_sim.timing import StepFeatures


@dataclass(frozen=True)
class Bench:
    """What the makers of policies and engines read of a study: without limits, since a shape must fit."""

    model: ModelSpec
    batch: BatchSettings
    engine: EngineSettings
    store: StoreSettings


class Place(NamedTuple):
    """One step of the design."""

    shape: int
    wave: int
    step: int


@dataclass(frozen=True, slots=True)
class Point:
    """A step that was measured: the cycles of its repeats, in nanoseconds, each from the end of the step before."""

    place: Place
    arm: str
    features: StepFeatures
    cycles_ns: tuple[int, ...]

    @property
    def mean_ns(self) -> float:
        """Mean of its repeats."""
        return fmean(self.cycles_ns)

    @property
    def median_ns(self) -> float:
        """Their median: a machine that does something else now and then does not move it."""
        return median(self.cycles_ns)


def measure(
    study: Any,
    model: Any,
    shapes: Sequence[Shape],
    repeats: int,
    seed: int,
    done: Callable[[], None] = lambda: None,
) -> list[Point]:
    """Run every shape `repeats` times from an empty cache, in an order shuffled anew each time.

    `study` has a model, a batch, an engine and arms; `done` is called after each run of a shape. The first shape is run
    once more before all others, and not counted.
    """
    bench = Bench(study.model, study.batch, study.engine, StoreSettings())
    found: dict[Place, list[int]] = defaultdict(list)
    steps: dict[Place, LoggedStep] = {}
    _run(bench, study.arms, model, shapes[0])
    for number in _orders(len(shapes), repeats, seed):
        for (wave, step), (logged, cycle) in _run(bench, study.arms, model, shapes[number]).items():
            place = Place(number, wave, step)
            assert steps.setdefault(place, logged).key == logged.key, "a shape took other steps than before"
            found[place].append(cycle)
        done()
    return [Point(at, shapes[at.shape].arm, steps[at].features, tuple(found[at])) for at in sorted(found)]


def _orders(count: int, repeats: int, seed: int) -> Iterator[int]:
    for repeat in range(repeats):
        yield from np.random.default_rng([seed, repeat]).permutation(count).tolist()


def _run(
    bench: Bench, arms: dict[str, Strategy], model: Any, shape: Shape
) -> dict[tuple[int, int], tuple[LoggedStep, int]]:
    """Steps and cycles of one run, by wave and number."""
    requests, strategy = shape.requests, arms[shape.arm]
    # builders take studies, of which they read no more than this
    whole: Any = bench
    policy = build.build_policy(whole, strategy, 0, max(request.num_tokens for request in requests))
    engine = build.build_engine(whole, strategy, model, policy, requests)
    _warm(engine, sum(request.num_tokens for request in requests) // bench.model.grid + 2 * len(requests))
    found = {}
    for number, wave in enumerate(shape.waves):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "steps.jsonl"
            with StepLog(path, policy) as log:  # written while it runs, as in a study: that is part of a step's cost
                serve(wave, engine, shape.rules, WallClock(), _forget, on_plan=log.planned, on_step=log.ran)
            logged = read_steps(path)
        found |= {(number, at): one for at, one in enumerate((step, step.took_ns) for step in logged)}
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

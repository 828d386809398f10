"""The simulator, told how long steps took, composes the engine's very steps, and notices a log of another run."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

pytest.importorskip("torch")

from spanlab.fidelity.replay import replay


def share(run, log):
    return replay(run.study, "cache_blend_15", run.trace, log)


def test_every_step_of_the_engine_is_composed_alike(run):
    found = share(run, run.log)
    assert found == (len(run.log), len(run.log), None)
    assert found.share == 1.0
    idled = sum(before.ended_ns < after.started_ns for before, after in pairwise(run.log))
    assert idled, "the engine never idled, and the test says little"
    assert any(step.features.copied_tokens for step in run.log)


def test_a_step_too_few_or_too_many_is_said(run):
    found = share(run, run.log[:-1])
    assert (found.equal, found.steps) == (len(run.log) - 1, len(run.log) - 1)
    assert found.difference.startswith(f"step {len(run.log) - 1}: the engine had finished, the simulator decodes for ")
    found = share(run, [*run.log, run.log[-1]])
    assert found.equal == len(run.log)
    assert found.difference.endswith("the simulator had finished")
    assert found.share < 1.0


def test_another_composition_is_said_and_ends_the_comparison(run):
    at = next(number for number, step in enumerate(run.log) if step.key[0] and number)
    (request, start, stop, *rest), *others = run.log[at].key[0]
    key = (((request, start, stop - 1, *rest), *others), *run.log[at].key[1:])
    found = share(run, [*run.log[:at], replace(run.log[at], key=key), *run.log[at + 1 :]])
    assert found.equal == at
    says = f"[{start}, {{}}) of request {request}"
    words = f"the engine computes {says.format(stop - 1)}, the simulator computes {says.format(stop)}"
    assert found.difference == f"step {at}: {words}"


def test_a_step_of_the_same_composition_at_another_time_is_said(run):
    """Where eviction goes by age, times decide what is left."""
    at = len(run.log) // 2
    log = [*run.log[:at], replace(run.log[at], started_ns=run.log[at].started_ns + 1), *run.log[at + 1 :]]
    found = share(run, log)
    assert found.equal == at
    assert found.difference.startswith(f"step {at}: the engine began it 1 ns later")


def test_other_arrivals_give_other_steps(run):
    """Who comes between two decisions depends on when they are: parity holds for the measured times alone."""
    together = [replace(request, arrived_at=run.trace.requests[0].arrived_at) for request in run.trace.requests]
    assert replay(run.study, "cache_blend_15", replace(run.trace, requests=together), run.log).share < 1.0

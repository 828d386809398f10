"""Effects of a backend on the process that runs it."""

import gc
import weakref
from pathlib import Path

import pytest

from spanlab.cli import compose
from spanlab.study.backends import Simulator
from spanlab.study.jobs import Job


def simulate(monkeypatch, during) -> None:
    """Simulate a run of `smoke` that calls `during` and breaks off."""

    def breaks(*arguments, **named):
        during()
        raise ZeroDivisionError

    study = compose("smoke", ["tracking.kind=none"])
    monkeypatch.setattr("spanlab.study.backends.Run", breaks)
    job = Job(study.arms["none"], (), study.batch, 0, 1.0, 0, 1, 0, Path("steps.jsonl"))
    gc.collect()
    with pytest.raises(ZeroDivisionError):
        Simulator(study).simulate(job, print)


def test_a_simulation_restores_the_garbage_collector(monkeypatch):
    usual, thresholds = gc.get_threshold(), []
    simulate(monkeypatch, lambda: thresholds.append(gc.get_threshold()))
    assert thresholds == [(1_000_000, *usual[1:])] != [usual]
    assert gc.get_threshold() == usual


@pytest.mark.parametrize("collects", [False, True])  # as it does by itself in a run of many objects
def test_cycles_of_a_large_run_are_freed_and_those_of_small_runs_wait(monkeypatch, collects):
    class Node:
        def __init__(self):
            self.parent = self

    seen = []

    def during():
        if collects:
            gc.collect(0)
        seen.append(weakref.ref(Node()))

    simulate(monkeypatch, during)
    assert (seen[0]() is None) == collects

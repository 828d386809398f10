"""Effects of a backend on the process that runs it."""

import gc
from pathlib import Path

import pytest

from spanlab.cli import compose
from spanlab.study.backends import Simulator
from spanlab.study.jobs import Job


def test_a_simulation_restores_the_garbage_collector(monkeypatch):
    study, usual, thresholds = compose("smoke", ["tracking.kind=none"]), gc.get_threshold(), []

    def breaks(*arguments, **named):
        thresholds.append(gc.get_threshold())
        raise ZeroDivisionError

    monkeypatch.setattr("spanlab.study.backends.Run", breaks)
    job = Job(study.arms["none"], (), study.batch, 0, 1.0, 0, 1, 0, Path("steps.jsonl"))
    with pytest.raises(ZeroDivisionError):
        Simulator(study).simulate(job, print)
    assert thresholds == [(1_000_000, *usual[1:])] != [usual]
    assert gc.get_threshold() == usual

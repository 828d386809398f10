"""Offered work ÷ capacity against queues whose load is known."""

from types import SimpleNamespace

import numpy as np
import pytest

from spanlab.core.admission import BatchRules
from spanlab.core.step import StepFeatures
from spanlab.study.numbers import Columns, utilisation_of
from spanlab_sim.run import DemandMeter
from spanlab_sim.timing import ConstantTiming


def record(output: int = 1, prompt: int = 100) -> SimpleNamespace:
    return SimpleNamespace(output_tokens=output, prompt_tokens=prompt)


def prompts(count: int) -> StepFeatures:
    """One step that computes so many prompts of 100 tokens."""
    return StepFeatures(prefill_tokens=100 * count, num_prefills=count, num_first_tokens=count)


def test_a_single_server_needs_its_service_times():
    """M/D/1 with 100 tokens of 10 ms: demand is 1 s a request, whatever the waiting."""
    meter = DemandMeter(ConstantTiming(0.01))
    for _ in range(40):
        assert meter.step(prompts(1)) == 1e9
        meter.finished(record())
    assert meter.demand_s(BatchRules(100, 1, enable_chunked_prefill=False)) == pytest.approx(40.0)


def test_small_steps_count_as_the_full_ones_that_would_do():
    """Each step costs 1 s and nothing else: 40 prompts of 100 tokens fit into 5 steps of 800."""
    meter = DemandMeter(ConstantTiming(0.0, seconds_per_step=1.0))
    for _ in range(40):
        meter.step(prompts(1))
        meter.finished(record())
    assert meter.demand_s(BatchRules(800, 64)) == pytest.approx(5.0)


def test_decodes_fill_the_seats_of_a_step():
    """40 outputs of 11 tokens: 400 decodes and 40 prefills on 4 seats are 110 steps."""
    meter = DemandMeter(ConstantTiming(0.0, seconds_per_step=1.0))
    for _ in range(40):
        meter.step(prompts(1))
        meter.span(StepFeatures(num_decodes=1, decode_context=101), 10)
        meter.finished(record(output=11))
    assert meter.demand_s(BatchRules(8192, 4)) == pytest.approx(110.0)


def test_work_is_the_sum_over_steps_in_any_split():
    one_step, parts = DemandMeter(ConstantTiming(0.01)), DemandMeter(ConstantTiming(0.01))
    one_step.step(prompts(10))
    for _ in range(10):
        parts.step(prompts(1))
        one_step.finished(record())
        parts.finished(record())
    assert one_step.demand_s(BatchRules()) == parts.demand_s(BatchRules())


def test_nothing_asked_needs_nothing():
    assert DemandMeter(ConstantTiming(0.01)).demand_s(BatchRules()) == 0.0


def columns(*times: float) -> Columns:
    return {"arrived_s": np.array(times), "seed": np.zeros(len(times), dtype=np.int64)}


def test_utilisation_is_demand_over_the_time_offered():
    # 4 arrivals in 6 s come at one every 2 s: 8 s for their work
    assert utilisation_of(columns(0, 2, 4, 6), [{"seed": 0, "demand_s": 6.0}]) == pytest.approx(0.75)


def test_without_a_timing_model_utilisation_is_unknown():
    assert utilisation_of(columns(0, 2), [{"seed": 0, "demand_s": None}]) is None
    assert utilisation_of(columns(3), [{"seed": 0, "demand_s": 1.0}]) is None

"""Serving: outputs, logs, step times and error messages."""

import time
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from spanlab.core.admission import BatchRules
from spanlab.core.step import Backend, ScheduledStep, StepResult
from spanlab.engine.engine import PHASES
from spanlab.records import RunRow
from spanlab_sim.run import serve

from .factories import (
    HEAD,
    Paced,
    Run,
    arm,
    document,
    make_request,
    make_small,
    nothing_leaks,
    questions,
    run,
    start,
    text,
)

LENGTHS = (20, 9, 33)


def serve_by(run: Run, requests, write=lambda record: None, backend: Backend | None = None, **options) -> RunRow:
    """Serve requests with measured step times, or those of `backend`."""
    return serve(requests, run.engine.policy, run.rules, backend or run.engine, write, **options)


def test_greedy_output_is_the_likeliest_token():
    requests = questions([(0, 1), (1, 0)], LENGTHS, output=5, at=0)
    run_result = run(make_small(), arm("pic"), requests)
    for request in requests:
        assert run_result.engine.outputs[request.id] == run_result.of(request).argmax(-1).tolist()
        assert len(run_result.engine.outputs[request.id]) == 5


def test_a_reused_request_id_starts_empty():
    requests = questions([(0, 1)], LENGTHS, output=4)
    run_result = start(make_small(), arm("pic", 1), requests).serve(requests)
    first = list(run_result.engine.outputs[0])
    longer = replace(requests[0], output_len=6)
    run_result.serve([longer])
    assert run_result.engine.outputs[0][:4] == first
    assert len(run_result.engine.outputs[0]) == 6


def test_a_turn_follows_the_answer_before_it():
    first, second = questions([(0, 1), (1, 0)], LENGTHS, output=3, at=0)
    requests = [first, replace(second, after=(first.id,), wait_ns=7_000_000)]
    run_result, records = start(make_small(), arm("pic"), requests), []
    serve_by(run_result, requests, records.append)
    assert [record.request_id for record in records] == [first.id, second.id]
    assert round(records[1].arrived_s * 1e9) == round(records[0].finished_s * 1e9) + 7_000_000
    assert nothing_leaks(run_result)


def step_log(name: str, requests) -> tuple[list[tuple[ScheduledStep, StepResult]], RunRow]:
    """A run in real time, and its steps."""
    run_result, log = start(make_small(), arm(name), requests), []
    row = serve_by(run_result, requests, clock="wall", on_step=lambda step, now, result: log.append((step, result)))
    assert nothing_leaks(run_result)
    return log, row


def test_step_phases_add_up_to_less_than_the_step():
    requests = questions([(0, 1), (1, 0)], LENGTHS, output=3, at=0)
    log, row = step_log("cache_blend_15", requests)
    assert row.steps == len(log)
    assert row.busy_s == pytest.approx(sum(result.duration_ns for _, result in log) * 1e-9)
    for step, result in log:
        assert set(result.phases) == set(PHASES)
        assert sum(result.phases.values()) <= result.duration_ns * 1e-9
        assert (result.phases["decode_s"] > 0) == (not step.chunks)
    step, result = log[0]
    assert min(result.phases[name] for name in ("plan_s", "copy_s", "repair_s", "prefill_s")) > 0
    assert step.chunks[0].sequence.first_token_at == result.duration_ns
    assert sum(len(step.decodes) for step, _ in log) == 2 * 2


@pytest.mark.parametrize(("name", "kinds"), [("none", {"prefill_s"}), ("pic", {"fill_s", "prefill_s"})])
def test_a_cold_prompt_is_only_filled_and_prefilled(name, kinds):
    log, _ = step_log(name, [make_request(0, document(0, 40), text(HEAD, 30))])
    phases = {key for key in ("repair_s", "prefill_s", "fill_s", "decode_s") if log[0][1].phases[key] > 0}
    assert phases <= kinds
    assert "prefill_s" in phases


def test_wall_clock_waits_for_arrivals():
    requests = questions([(0,), (1,)], LENGTHS, at=20_000_000)
    records = []
    run_result = start(make_small(), arm("pic"), requests)
    began = time.monotonic()
    serve_by(run_result, requests, records.append, clock="wall")
    assert time.monotonic() - began >= 0.02
    assert all(record.arrived_s <= record.admitted_s < record.first_token_s for record in records)


def test_the_first_requests_are_recorded_as_warm_up():
    requests = questions([(0,), (1,), (0,)], LENGTHS)
    run_result, records = start(make_small(), arm("pic"), requests), []
    serve_by(run_result, requests, records.append, Paced(run_result.engine, lambda step: 1), warmup=2)
    assert [record.counted for record in records] == [False, False, True]


def test_weights_that_are_no_numbers_end_in_one_sentence():
    broken = deepcopy(make_small().hf)
    with torch.no_grad():
        broken.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    model = replace(make_small(), name="broken", hf=broken)
    with pytest.raises(
        FloatingPointError, match=r"^Model 'broken' gave logits that are no finite numbers in step 0\.$"
    ):
        run(model, arm("pic"), questions([(0, 1)], LENGTHS))


def test_what_is_not_there_is_noticed():
    # The pool is filled with NaN, so reading an unwritten page gives no finite logits.
    requests = questions([(0, 1), (1, 0)], LENGTHS)
    run_result = start(make_small(), arm("pic"), requests).serve(requests[:1])
    run_result.engine.pool.keys(1)[run_result.stored[3]] = torch.nan
    with pytest.raises(FloatingPointError, match="no finite numbers"):
        run_result.serve(requests[1:])


def test_an_aborted_run_leaves_only_stored_entries():
    requests = questions([(0, 1), (1, 0)], LENGTHS, output=3, at=0)
    run_result = start(make_small(), arm("pic"), requests, rules=BatchRules(max_num_batched_tokens=64, max_num_seqs=1))
    run_result.serve(requests[:1])
    assert nothing_leaks(run_result)
    run_result.serve(requests[1:])
    assert nothing_leaks(run_result)


def test_the_simulators_own_rules_are_not_run():
    requests = questions([(0,)], LENGTHS)
    strategy = arm("radix")
    strategy.last_token = "reuse"
    with pytest.raises(AssertionError, match="the simulator's alone"):
        run(make_small(), strategy, requests)


def test_absolute_keys_of_spans_are_read_only_in_place():
    with pytest.raises(ValueError, match=r"keys=absolute with positions=sequential: expected keys=local"):
        arm("pic_turned", keys="absolute")


class Counter:
    """A machine's counter that advances by a fixed amount at every reading, ns."""

    def __init__(self, tick: int) -> None:
        self.value, self.tick = 0, tick

    def __call__(self) -> int:
        self.value += self.tick
        return self.value


def test_step_lasts_from_the_end_of_the_one_before():
    requests = questions([(0, 1)], LENGTHS, output=2)
    run_result = start(make_small(), arm("pic"), requests)
    counter, durations = Counter(10), []
    run_result.engine._counter = counter

    def note(step: ScheduledStep, now: int, result: StepResult) -> None:
        durations.append(result.duration_ns)
        counter.value += 1_000  # host work after the step

    serve_by(run_result, requests, on_step=note)
    assert durations == [20, 1_020]


def test_idle_time_belongs_to_no_step():
    requests = questions([(0, 1), (1, 0), (0,)], LENGTHS, output=3, at=10**9)

    def served(backend_of):
        run_result, steps, records = start(make_small(), arm("pic"), requests), [], []
        run_result.engine._counter = Counter(10)
        backend = backend_of(run_result.engine)
        serve_by(
            run_result, requests, records.append, backend, on_step=lambda step, now, _: steps.append((step.key(), now))
        )
        return steps, records

    measured, paced = served(lambda engine: engine), served(lambda engine: Paced(engine, lambda step: 30))
    assert [key for key, _ in measured[0]] == [key for key, _ in paced[0]]
    starts = [[at for _, at in steps if at % 10**9 == 0] for steps, _ in (measured, paced)]
    assert starts[0] == starts[1] == [0, 10**9, 2 * 10**9], "each idle period ends at an arrival"
    assert [record.admitted_s for record in measured[1]] == [0.0, 1.0, 2.0]
    assert all(record.first_token_s - record.arrived_s < 1e-6 for record in measured[1])

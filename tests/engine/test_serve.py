"""Serving: what comes out, what is logged, and what is refused in one sentence."""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from spanlab.core.scheduler import BatchRules, StepPlan
from spanlab.engine.clock import SkipIdleClock, ToldClock, WallClock
from spanlab.engine.serve import StepRow, serve
from spanlab.records import RunRow

from .factories import HEAD, arm, ask, document, make_small, nothing_leaks, questions, run, start, text

LENGTHS = (20, 9, 33)


def test_greedy_says_what_is_likeliest():
    requests = questions([(0, 1), (1, 0)], LENGTHS, output=5, at=0)
    done = run(make_small(), arm("pic"), requests)
    for request in requests:
        assert done.engine.outputs[request.id] == done.of(request).argmax(-1).tolist()
        assert len(done.engine.outputs[request.id]) == 5


def test_an_id_that_comes_back_begins_anew():
    requests = questions([(0, 1)], LENGTHS, output=4)
    done = start(make_small(), arm("pic", 1), requests).serve(requests)
    first = list(done.engine.outputs[0])
    longer = replace(requests[0], output_len=6)
    done.serve([longer])
    assert done.engine.outputs[0][:4] == first
    assert len(done.engine.outputs[0]) == 6


def step_log(name: str, requests) -> tuple[list[tuple[StepPlan, StepRow]], RunRow]:
    """A run on the machine's clock, and its steps."""
    done, log = start(make_small(), arm(name), requests), []

    def note(step: StepPlan, row: StepRow) -> None:
        log.append((step, row))

    row = serve(requests, done.engine, done.rules, WallClock(), lambda record: None, on_step=note)
    assert nothing_leaks(done)
    return log, row


def test_the_step_log_says_where_the_time_went():
    requests = questions([(0, 1), (1, 0)], LENGTHS, output=3, at=0)
    log, row = step_log("cache_blend_15", requests)
    assert row.steps == len(log)
    for step, line in log:
        parts = (line.copy_s, line.repair_s, line.prefill_s, line.fill_s, line.decode_s)
        assert line.started_ns <= line.planned_ns <= line.ended_ns
        assert sum(parts) <= (line.ended_ns - line.planned_ns) * 1e-9
        assert (line.decode_s > 0) == (not step.chunks)
    first = log[0][1]
    assert min(first.copy_s, first.repair_s, first.prefill_s) > 0
    assert log[0][0].chunks[0].sequence.first_token_at == first.ended_ns
    assert sum(len(step.decodes) for step, _ in log) == 2 * 2


@pytest.mark.parametrize(("name", "kinds"), [("none", {"prefill_s"}), ("pic", {"fill_s", "prefill_s"})])
def test_a_cold_prompt_is_only_filled_and_prefilled(name, kinds):
    log, _ = step_log(name, [ask(0, document(0, 40), text(HEAD, 30))])
    spent = {key for key in ("repair_s", "prefill_s", "fill_s", "decode_s") if getattr(log[0][1], key) > 0}
    assert spent <= kinds
    assert "prefill_s" in spent


def test_arrivals_are_waited_for_on_the_machines_clock():
    requests = questions([(0,), (1,)], LENGTHS, at=20_000_000)
    records = []
    done = start(make_small(), arm("pic"), requests)
    began = time.monotonic()
    serve(requests, done.engine, done.rules, WallClock(), records.append)
    assert time.monotonic() - began >= 0.02
    assert all(record.arrived_s <= record.admitted_s < record.first_token_s for record in records)


def test_a_told_clock_never_goes_back():
    clock = ToldClock(lambda step: 5)
    assert [clock.wait_until(7), clock.wait_until(3), clock.after(StepPlan([], [], [])), clock.now()] == [7, 7, 12, 12]


def test_the_first_requests_are_recorded_as_warm_up():
    requests = questions([(0,), (1,), (0,)], LENGTHS)
    done, records = start(make_small(), arm("pic"), requests), []
    serve(requests, done.engine, done.rules, ToldClock(lambda step: 1), records.append, warmup=2)
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
    # The pool is poisoned with NaN, so whoever reads a page that nobody wrote gets no finite logits.
    requests = questions([(0, 1), (1, 0)], LENGTHS)
    done = start(make_small(), arm("pic"), requests).serve(requests[:1])
    done.engine.pool.keys(1)[done.stored[3]] = torch.nan
    with pytest.raises(FloatingPointError, match="no finite numbers"):
        done.serve(requests[1:])


def test_a_run_that_broke_off_leaves_nothing_but_what_is_stored():
    requests = questions([(0, 1), (1, 0)], LENGTHS, output=3, at=0)
    done = start(make_small(), arm("pic"), requests, rules=BatchRules(token_budget=64, max_num_seqs=1))
    done.serve(requests[:1])
    assert nothing_leaks(done)
    done.serve(requests[1:])
    assert nothing_leaks(done)


def test_the_simulators_own_rules_are_not_run():
    requests = questions([(0,)], LENGTHS)
    strategy = arm("radix")
    strategy.last_token = "reuse"
    with pytest.raises(AssertionError, match="the simulator's alone"):
        run(make_small(), strategy, requests)


def test_absolute_keys_of_spans_are_read_in_place_or_not_at_all():
    with pytest.raises(ValueError, match=r"keys=absolute with positions=sequential: expected keys=local"):
        arm("pic_turned", keys="absolute")


class Counter:
    """A machine's counter that advances by a fixed amount at every reading, ns."""

    def __init__(self, tick: int) -> None:
        self.value, self.tick = 0, tick

    def __call__(self) -> int:
        self.value += self.tick
        return self.value


def test_idle_time_is_skipped_and_work_is_not():
    counter = Counter(1)
    clock = SkipIdleClock(counter)
    assert clock.now() == 1
    assert clock.wait_until(1_000) == 1_001
    counter.value += 50
    assert clock.after(StepPlan([], [], [])) == 1_052
    assert clock.wait_until(7) == 1_054, "a moment in the past leaves the clock as it is"


def test_skipped_idle_time_leaves_the_schedule():
    requests = questions([(0, 1), (1, 0), (0,)], LENGTHS, output=3, at=10**9)

    def served(clock):
        done, steps, records = start(make_small(), arm("pic"), requests), [], []
        serve(
            requests,
            done.engine,
            done.rules,
            clock,
            records.append,
            on_step=lambda step, row: steps.append((step.key(), row.started_ns)),
        )
        return steps, records

    skipped, told = served(SkipIdleClock(Counter(10))), served(ToldClock(lambda step: 30))
    assert [key for key, _ in skipped[0]] == [key for key, _ in told[0]]
    starts = [[at for _, at in steps if at % 10**9 == 0] for steps, _ in (skipped, told)]
    assert starts[0] == starts[1] == [0, 10**9, 2 * 10**9], "each idle period ends at an arrival"
    assert [record.admitted_s for record in skipped[1]] == [0.0, 1.0, 2.0]
    assert all(record.first_token_s - record.arrived_s < 1e-6 for record in skipped[1])

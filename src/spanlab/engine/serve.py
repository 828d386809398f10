"""One run on the engine: one arm, one seed, one load, from the first arrival to the last token."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from spanlab.account import Gauge, as_record
from spanlab.core.request import Request
from spanlab.core.scheduler import BatchRules, Scheduler, Sequence, StepPlan
from spanlab.engine.clock import Clock
from spanlab.engine.engine import Engine
from spanlab.records import Record, RunRow


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step of a run: when it was, in nanoseconds since the run began, and the seconds of its parts.

    `started_ns`  the end of the step before it, or where nobody was there then the arrival that it was made for
    `planned_ns`  when it was decided what it does, `ended_ns` when it had run
    """

    started_ns: int
    planned_ns: int
    ended_ns: int
    copy_s: float
    repair_s: float
    prefill_s: float
    fill_s: float
    decode_s: float


OnStep = Callable[[StepPlan, StepRow], None]


def serve(
    requests: Ordered[Request],
    engine: Engine,
    rules: BatchRules,
    clock: Clock,
    on_record: Callable[[Record], None],
    *,
    seed: int = 0,
    rate_rps: float | None = None,
    warmup: int = 0,
    on_step: OnStep = lambda step, row: None,
    on_plan: Callable[[StepPlan, int], None] = lambda step, now: None,
) -> RunRow:
    """Serve `requests`, sorted by arrival; the first `warmup` of them are recorded as not counted.

    The scheduler is driven exactly as in the simulator: one step at a time, finishes before arrivals at equal times.
    `on_plan` sees every step before it runs, `on_step` afterwards.
    """
    run = _Run(requests, engine, rules, clock)
    while not run.over:
        now = run.arrive()
        run.gauge.advance(now)
        step = run.scheduler.plan_step(now)
        assert step is not None, "requests wait, memory is free, and nothing was planned"
        on_plan(step, now)
        row, ended = run.one(step, now)
        on_step(step, row)
        for sequence in ended:
            counted = run.rank[sequence.request.id] >= warmup
            run.preemptions += sequence.preemptions
            on_record(as_record(sequence, engine.policy, seed, rate_rps, counted))
    engine.close()
    return run.gauge.row(seed, rate_rps, len(requests), run.preemptions, run.busy_ns, run.steps)


class _Run:
    def __init__(self, requests: Ordered[Request], engine: Engine, rules: BatchRules, clock: Clock) -> None:
        self.scheduler, self.gauge = Scheduler(engine.policy, rules), Gauge(engine.policy)
        self.rank = {request.id: rank for rank, request in enumerate(requests)}
        self.busy_ns = self.steps = self.preemptions = 0
        self._engine, self._clock, self._coming = engine, clock, deque(requests)
        self._now = 0  # the end of the last step

    @property
    def over(self) -> bool:
        return self.scheduler.idle and not self._coming

    def arrive(self) -> int:
        """Queue whoever has come by the time of the next decision: the last step's end, or the next arrival's moment.

        Those are the times at which a simulator decides. What passes before the decision is made, such as the
        bookkeeping of the last step, counts into the step that it is about.
        """
        now = self._now
        while self._coming and self._coming[0].arrived_at < now:
            self.scheduler.add(self._coming.popleft())
        if self.scheduler.idle:
            now = self._coming[0].arrived_at
            self._clock.wait_until(now)
            while self._coming and self._coming[0].arrived_at == now:
                self.scheduler.add(self._coming.popleft())
        return now

    def one(self, step: StepPlan, now: int) -> tuple[StepRow, list[Sequence]]:
        planned = self._clock.now()
        times = self._engine.run(step)
        ended = _ended(step)
        over = self._now = self._clock.after(step)
        self.busy_ns += over - now
        self.steps += 1
        self.gauge.advance(over)
        self.scheduler.commit(step, over, ended)
        self._engine.commit(step)
        return StepRow(now, planned, over, *times), ended


def _ended(step: StepPlan) -> list[Sequence]:
    """Sequences that have their whole output once this step is over."""
    first = [chunk.sequence for chunk in step.chunks if chunk.last]
    return [one for one in (*first, *step.decodes) if one.generated + 1 >= one.request.output_len]

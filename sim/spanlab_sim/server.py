"""One engine and its arrivals as SimPy processes. Simulated time is integer nanoseconds."""

from __future__ import annotations

from collections.abc import Callable, Generator
from collections.abc import Sequence as Ordered

import simpy
from simpy.events import URGENT

from spanlab.core.request import Request
from spanlab.core.scheduler import Scheduler, Sequence, StepPlan
from spanlab_sim.backend import ModelledBackend

Events = Generator[simpy.Event, object, None]


class Server:
    """Feeds requests to a scheduler as they arrive, and lets it run one step after another.

    `on_step`      called at the start of every step with the plan and `now`
    `on_finished`  called with each finished sequence
    `on_change`    called with `now` before what the store holds may change
    """

    def __init__(
        self,
        env: simpy.Environment,
        requests: Ordered[Request],
        scheduler: Scheduler,
        backend: ModelledBackend,
        on_finished: Callable[[Sequence], None],
        on_step: Callable[[StepPlan, int], None] = lambda step, now: None,
        on_change: Callable[[int], None] = lambda now: None,
    ) -> None:
        self._env, self._scheduler, self._backend = env, scheduler, backend
        self._requests, self._arrived = requests, 0
        self._on_finished, self._on_step, self._on_change = on_finished, on_step, on_change
        self._wake = env.event()
        self.busy_ns = self.steps = 0
        env.process(self._arrivals())
        env.process(self._engine())

    def _arrivals(self) -> Events:
        for request in self._requests:
            if request.arrived_at > self._env.now:
                yield self._env.timeout(request.arrived_at - int(self._env.now))
            self._arrived += 1
            self._scheduler.add(request)
            if not self._wake.triggered:
                self._wake.succeed()

    def _engine(self) -> Events:
        while not (self._scheduler.idle and self._arrived == len(self._requests)):
            now = int(self._env.now)
            self._on_change(now)
            step = self._scheduler.plan_step(now)
            if step is None:
                assert self._scheduler.idle, "requests wait, memory is free, and nothing was planned"
                self._wake = self._env.event()
                yield self._wake
                continue
            yield from self._run(step, now)

    def _run(self, step: StepPlan, now: int) -> Events:
        self._on_step(step, now)
        duration = self._backend.run(step, self._scheduler, now, self._next_arrival())
        ended = self._backend.ended(step)
        yield self._after(duration)
        self.busy_ns += duration
        self.steps += step.repeats
        now = int(self._env.now)
        self._on_change(now)
        self._scheduler.commit(step, now, ended)
        for sequence in ended:
            self._on_finished(sequence)

    def _next_arrival(self) -> int | None:
        return self._requests[self._arrived].arrived_at if self._arrived < len(self._requests) else None

    def _after(self, duration: int) -> simpy.Event:
        """An event after `duration`. At equal times a finish precedes an arrival, hence the priority."""
        event = self._env.event()
        event._ok, event._value = True, None
        self._env.schedule(event, priority=URGENT, delay=duration)
        return event

"""The serving loop: arrivals and one engine as SimPy processes. Time is integer nanoseconds."""

from __future__ import annotations

from collections.abc import Callable, Generator
from collections.abc import Sequence as Ordered
from dataclasses import replace

import simpy

from spanlab.core.backend import Backend, StepResult
from spanlab.core.request import Request
from spanlab.core.scheduler import ScheduledStep, Scheduler, Sequence
from spanlab_sim.loads import Loads

Events = Generator[simpy.Event, object, None]
OnStep = Callable[[ScheduledStep, int, StepResult], None]


class Server:
    """Feeds requests to a scheduler as they arrive, and lets a backend run one step after another.

    A request that arrives at the very end of a step is scheduled after the next one, unless nothing else is to do.

    `clients`      most requests in flight: a further one arrives when one of them finishes; None is no limit
    `loads`        from lower tiers; None where there are none
    `on_step`      called with each step, the time of its start, and its result, before the scheduler moves on
    `on_finished`  called with each finished sequence
    `on_change`    called with the time before what the store holds may change
    """

    def __init__(
        self,
        env: simpy.Environment,
        requests: Ordered[Request],
        scheduler: Scheduler,
        backend: Backend,
        on_finished: Callable[[Sequence], None],
        on_step: OnStep = lambda step, now, result: None,
        on_change: Callable[[int], None] = lambda now: None,
        clients: int | None = None,
        loads: Loads | None = None,
    ) -> None:
        self._loads = loads
        self._env, self._scheduler, self._backend = env, scheduler, backend
        self._requests, self._clients = requests, clients or len(requests)
        self._arrived: list[Request] = []
        self._queued = self._finished = 0  # of the arrived requests; those not queued wait for the end of a step
        self._on_finished, self._on_step, self._on_change = on_finished, on_step, on_change
        self._wake, self._freed = env.event(), env.event()
        self.busy_ns = self.steps = 0
        env.process(self._arrivals())
        env.process(self._engine())

    def _arrivals(self) -> Events:
        for request in self._requests:
            if request.arrived_at > self._env.now:
                yield self._env.timeout(request.arrived_at - int(self._env.now))
            if self._full:
                yield self._freed
            late = request.arrived_at < self._env.now
            self._arrived.append(replace(request, arrived_at=int(self._env.now)) if late else request)
            if not self._wake.triggered:
                self._wake.succeed()

    @property
    def _full(self) -> bool:
        """Whether as many requests are in flight as there are clients."""
        return len(self._arrived) - self._finished >= self._clients

    def _engine(self) -> Events:
        self._backend.resume()
        while not (self._scheduler.idle and self._queued == len(self._requests)):
            now = int(self._env.now)
            self._queue(now)
            self._on_change(now)
            step = self._scheduler.schedule(now)
            if step is not None:
                yield from self._run(step, now)
                continue
            yield from self._wait(now)
            self._backend.resume()
        self._backend.close()

    def _wait(self, now: int) -> Events:
        """Wait for the next request, or until what a request loads is there."""
        queued = self._queued
        self._hand_over(now + 1)
        if self._queued > queued:  # it arrives now, and nothing but a load is under way
            return
        loaded = None if self._loads is None else self._loads.next_arrival()
        assert self._scheduler.idle or loaded is not None, "requests wait, memory is free, and nothing was planned"
        self._wake = self._env.event()
        yield self._wake if loaded is None else self._wake | self._env.timeout(loaded - now)

    def _queue(self, now: int) -> None:
        """Hand over what arrived before `now`, and what arrives now where the scheduler is idle."""
        self._hand_over(now)
        if self._scheduler.idle:
            self._hand_over(now + 1)

    def _hand_over(self, before: int) -> None:
        while self._queued < len(self._arrived) and self._arrived[self._queued].arrived_at < before:
            self._scheduler.add(self._arrived[self._queued])
            self._queued += 1

    def _run(self, step: ScheduledStep, now: int) -> Events:
        result = self._backend.execute(step, self._deadline(now))
        if result.repeats > 1:
            self._scheduler.repeat(step, result.repeats)
        self._on_step(step, now, result)
        yield self._env.timeout(result.duration_ns)
        self.busy_ns += result.duration_ns
        self.steps += step.repeats
        now = int(self._env.now)
        self._on_change(now)
        self._scheduler.complete(step, now, result.finished)
        self._backend.completed(step)
        for sequence in result.finished:
            self._on_finished(sequence)
        if result.finished:
            self._count_finished(len(result.finished))

    def _count_finished(self, count: int) -> None:
        waits = self._full and len(self._arrived) < len(self._requests)
        self._finished += count
        if waits and not self._full:
            freed, self._freed = self._freed, self._env.event()
            freed.succeed()

    def _deadline(self, now: int) -> int | None:
        """Nanoseconds until a request arrives or a load ends; None where none does before another request finishes."""
        arrival, loaded = self._next_request(now), None if self._loads is None else self._loads.next_arrival()
        if loaded is None:
            return arrival
        return loaded - now if arrival is None else min(arrival, loaded - now)

    def _next_request(self, now: int) -> int | None:
        if self._queued < len(self._arrived):
            return self._arrived[self._queued].arrived_at - now
        if len(self._arrived) == len(self._requests) or self._full:
            return None
        return self._requests[len(self._arrived)].arrived_at - now

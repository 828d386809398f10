"""One engine of a server: its queue, its scheduler, and the loop in which its backend runs steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import simpy

from spanlab.core.backend import Backend, StepResult
from spanlab.core.policies.over_tiers import OverTiers
from spanlab.core.request import Request
from spanlab.core.reuse import ReusePlan
from spanlab.core.scheduled import ScheduledStep, Sequence
from spanlab.core.scheduler import Scheduler

if TYPE_CHECKING:
    from spanlab_sim.server import Server  # which sends requests to replicas

Events = Generator[simpy.Event, object, None]
OnStep = Callable[[ScheduledStep, int, StepResult], None]
Arrange = Callable[[Request, int], Request]


def as_given(request: Request, now: int) -> Request:
    """Return the request unchanged."""
    return request


class Replica:
    """Queues the requests sent to it, and lets a backend run one step after another.

    A request that arrives at the very end of a step is scheduled after the next one, unless the scheduler is idle.

    `arrange`      called with each request and the time when it is sent; returns the request that is served
    `on_finished`  called with each finished sequence
    `on_step`      called with each step, the time of its start, and its result, before the scheduler advances
    `on_change`    called with the time before the content of the store may change
    `on_stored`    called with each step once the policy has stored its tokens; a router may set it
    `loads`        policy over lower tiers, whose loads steps may follow; None where there are no tiers
    """

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        backend: Backend,
        on_finished: Callable[[Sequence], None],
        on_step: OnStep = lambda step, now, result: None,
        on_change: Callable[[int], None] = lambda now: None,
        loads: OverTiers[Any] | None = None,
        arrange: Arrange = as_given,
    ) -> None:
        self.scheduler, self._env, self._backend, self._loads = scheduler, env, backend, loads
        self._on_finished, self._on_step, self._on_change = on_finished, on_step, on_change
        self._arrange = arrange
        self.on_stored: Callable[[ScheduledStep], None] = lambda step: None
        self._sent: deque[Request] = deque()  # requests that wait for the end of a step
        self._wake = env.event()
        self._step_ends = 0
        self.busy_ns = self.steps = 0

    def start(self, server: Server) -> None:
        """Start serving requests."""
        self._env.process(self._serve(server))

    def send(self, request: Request) -> None:
        """Queue a request that arrives now."""
        self._sent.append(self._arrange(request, self.now))
        if not self._wake.triggered:
            self._wake.succeed()

    def close(self) -> None:
        """End the run."""
        self._backend.close()

    # -- read by routers ----------------------------------------------------------------------------------------------

    @property
    def now(self) -> int:
        """Nanoseconds on the clock of the run."""
        return int(self._env.now)

    @property
    def requests(self) -> int:
        """Number of requests sent to it that have not finished."""
        scheduler = self.scheduler
        return len(self._sent) + len(scheduler.waiting) + len(scheduler.running) + len(scheduler.loading)

    @property
    def tokens(self) -> int:
        """Prompt tokens of these requests."""
        scheduler = self.scheduler
        queued = sum([sequence.prompt for sequence in (*scheduler.waiting, *scheduler.running, *scheduler.loading)])
        return queued + sum([request.num_tokens for request in self._sent])

    def cached(self, request: Request, now: int) -> int:
        """Return the prompt tokens of a request that it would reuse now."""
        plan: ReusePlan = self.scheduler.policy.match(request, now)
        return plan.reused

    # -- the loop -----------------------------------------------------------------------------------------------------

    @property
    def step_ends(self) -> int | None:
        """When its step ends, or now at the latest where the next is about to begin; None without work."""
        return None if self.scheduler.idle and not self._sent else self._step_ends

    def _serve(self, server: Server) -> Events:
        self._backend.resume()
        while True:
            now = int(self._env.now)
            self._queue(now)
            self._on_change(now)
            step = self.scheduler.schedule(now)
            if step is not None:
                yield from self._run(step, now, server)
                continue
            if self._sent:  # a request that arrives now, while only a load is in flight
                self._hand_over(now + 1)
                continue
            yield self._awaited(now)
            self._backend.resume()

    def _awaited(self, now: int) -> simpy.Event:
        """Return the event of the next request, or of the end of a load that a request waits for."""
        self._wake = self._env.event()
        loaded = None if self._loads is None else self._loads.next_arrival()
        if loaded is None:
            assert self.scheduler.idle, "requests wait, memory is free, and nothing was planned"
            return self._wake
        self._step_ends = loaded
        return self._wake | self._env.timeout(loaded - now)

    def _queue(self, now: int) -> None:
        """Pass on what arrived before `now`, and what arrives now where the scheduler is idle."""
        self._hand_over(now)
        if self.scheduler.idle:
            self._hand_over(now + 1)

    def _hand_over(self, before: int) -> None:
        while self._sent and self._sent[0].arrived_at < before:
            self.scheduler.add(self._sent.popleft())

    def _run(self, step: ScheduledStep, now: int, server: Server) -> Events:
        result = self._backend.execute(step, self._deadline(now, server))
        if self._loads is not None:
            result = replace(result, duration_ns=self._loads.step_duration(result.duration_ns))
        if result.repeats > 1:
            self.scheduler.repeat(step, result.repeats, lambda repeat: self._on_change(now + result.end_of(repeat)))
        self._on_step(step, now, result)
        self._step_ends = now + result.duration_ns
        yield self._env.timeout(result.duration_ns)
        self.busy_ns += result.duration_ns
        self.steps += step.repeats
        now = int(self._env.now)
        self._on_change(now)
        self.scheduler.complete(step, now, result.finished, result.accepted)
        self._backend.completed(step)
        self.on_stored(step)
        for sequence in result.finished:
            self._on_finished(sequence)
            server.finished(sequence)

    def _deadline(self, now: int, server: Server) -> int | None:
        """Return the nanoseconds until a request may arrive or a load ends; None: not before a sequence finishes."""
        arrival = self._sent[0].arrived_at if self._sent else server.next_arrival(self)
        loaded = None if self._loads is None else self._loads.next_arrival()
        return min([time - now for time in (arrival, loaded) if time is not None], default=None)

"""The serving loop: requests arrive, a router sends them to replicas. Time is integer
nanoseconds."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

import simpy

from spanlab.core.plan import ReusePlan
from spanlab.core.policies.tiered import OverTiers
from spanlab.core.request import Request
from spanlab.core.scheduler import Scheduler
from spanlab.core.step import Backend, ScheduledSequence, ScheduledStep, StepResult
from spanlab_sim.routing import Observer, Route

# ------------------------------------------------------------------------------
# Requests that wait for other requests to finish: turns of a session, and steps of an agent
# that join several.
# ------------------------------------------------------------------------------


class Followers:
    """Requests that wait for others; raises ValueError as `check_after` does."""

    def __init__(self, requests: Ordered[Request]) -> None:
        check_after(requests)
        self._num_awaited: dict[int, int] = {}  # by waiting request: requests that it still awaits
        # by request: its followers, with their ranks
        self._waiting_for: dict[int, list[tuple[int, Request]]] = {}
        for rank, request in enumerate(requests):
            if request.after:
                self._num_awaited[request.id] = len(set(request.after))
            for other in set(request.after):
                self._waiting_for.setdefault(other, []).append((rank, request))

    @property
    def waiting(self) -> bool:
        """Whether any request waits for another."""
        return bool(self._num_awaited)

    def released_by(self, finished: int) -> list[tuple[int, Request]]:
        """Return the requests, with their ranks, whose last awaited request is this one."""
        released = []
        for rank, request in self._waiting_for.pop(finished, ()):
            self._num_awaited[request.id] -= 1
            if not self._num_awaited[request.id]:
                del self._num_awaited[request.id]
                released.append((rank, request))
        return released


def check_after(requests: Ordered[Request]) -> None:
    """Raise ValueError for requests that could never arrive, or would arrive before those they wait
    for."""
    ids = {request.id for request in requests}
    for request in requests:
        if unknown := set(request.after) - ids:
            raise ValueError(
                f"request.after={request.after} of request {request.id}: expected ids of requests, "
                f"there is no request {min(unknown)}"
            )
        if request.wait_ns < 0:
            raise ValueError(
                f"request.wait_ns={request.wait_ns} of request {request.id}: expected 0 or more"
            )
    try:
        TopologicalSorter({request.id: request.after for request in requests}).prepare()
    except CycleError as error:
        circle = " waits for ".join(str(number) for number in reversed(error.args[1]))
        raise ValueError(
            f"request.after of request {circle}: expected requests that finish before it"
        ) from None


# ------------------------------------------------------------------------------
# The next request to arrive: at its recorded time, or some time after the requests that it
# waits for.
# ------------------------------------------------------------------------------


class Source:
    """Requests in order of arrival; the end of a request may let others arrive.

    A request without `after` arrives at its `arrived_at`. Another arrives `wait_ns` after the last
    request that it names has finished, and not before its `arrived_at`. At equal times those
    without `after` come first, and then the one that stands first in `requests`.

    `requests`  those without `after` sorted by arrival; ValueError where `after` cannot be
                satisfied
    `clients`   most requests in flight: a further one arrives when one of them finishes; None is no
                limit
    `warmup`    number of the first requests to arrive whose ids are recorded in `early`
    """

    def __init__(
        self, requests: Ordered[Request], clients: int | None = None, warmup: int = 0
    ) -> None:
        self._independent, self._num_taken = requests, 0
        self._followers: Followers | None = None
        self._released: list[tuple[int, int, Request]] = []  # a heap by time, then by rank
        if any(request.after for request in requests):
            self._independent = [r for r in requests if not r.after]
            self._followers = Followers(requests)
        self.early: set[int] = set()
        self._warmup = warmup
        self._in_flight, self._clients = 0, len(requests) if clients is None else clients

    @property
    def reacts(self) -> bool:
        """Whether the end of a request may let another one arrive."""
        if self._followers is not None and self._followers.waiting:
            return True
        return self._in_flight >= self._clients and (
            self._independent_at is not None or bool(self._released)
        )

    @property
    def next_at(self) -> int | None:
        """When the next request arrives, or could have arrived; None where none does before another
        finishes."""
        if self._in_flight >= self._clients:
            return None
        free = self._independent_at
        if not self._released:
            return free
        return self._released[0][0] if free is None else min(free, self._released[0][0])

    @property
    def _independent_at(self) -> int | None:
        return (
            self._independent[self._num_taken].arrived_at
            if self._num_taken < len(self._independent)
            else None
        )

    def take(self, now: int) -> Request | None:
        """Return a request that arrives at `now`, with this time; None where no further one
        does."""
        due = self.next_at
        if due is None or due > now:
            return None
        self._in_flight += 1
        if due == self._independent_at:
            request = self._independent[self._num_taken]
            self._num_taken += 1
        else:
            request = heapq.heappop(self._released)[2]
        if len(self.early) < self._warmup:
            self.early.add(request.id)
        return request if request.arrived_at == now else replace(request, arrived_at=now)

    def finished(self, request: Request, now: int) -> None:
        """Note the end of a request, which may let others arrive."""
        self._in_flight -= 1
        if self._followers is not None:
            for rank, follower in self._followers.released_by(request.id):
                heapq.heappush(
                    self._released,
                    (max(follower.arrived_at, now + follower.wait_ns), rank, follower),
                )


# ------------------------------------------------------------------------------
# One engine of a server: its queue, its scheduler, and the loop in which its backend runs
# steps.
# ------------------------------------------------------------------------------

Events = Generator[simpy.Event, object, None]
OnStep = Callable[[ScheduledStep, int, StepResult], None]


def no_note(step: ScheduledStep, now: int, result: StepResult) -> None:
    """Note nothing of a step."""


class Replica:
    """Queues the requests sent to it, and lets a backend run one step after another.

    A request that arrives at the very end of a step is scheduled after the next one, unless the
    scheduler is idle.

    `observers`  are told what happens, in this order; a router may add itself
    `number`     of the replica in its run
    `loads`      policy over lower tiers, whose loads steps may follow; None where there are no
                 tiers
    """

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        backend: Backend,
        observer: Observer,
        *,
        number: int = 0,
        loads: OverTiers[Any] | None = None,
    ) -> None:
        self.scheduler, self._env, self._backend, self._loads = scheduler, env, backend, loads
        self.observers, self._number = [observer], number
        self._sent: deque[Request] = deque()  # requests that wait for the end of a step
        self._wake = env.event()
        self._step_ends = 0
        self.busy_ns = self.steps = 0

    def start(self, server: Server) -> None:
        """Start serving requests."""
        self._env.process(self._serve(server))

    def send(self, request: Request) -> None:
        """Queue a request that arrives now."""
        for observer in self.observers:
            request = observer.arrived(request, self.now)
        self._sent.append(request)
        if not self._wake.triggered:
            self._wake.succeed()

    def close(self) -> None:
        """End the run."""
        self._backend.close()

    # -- read by routers ---------------------------------------------------------------------------

    @property
    def now(self) -> int:
        """Nanoseconds on the clock of the run."""
        return int(self._env.now)

    @property
    def requests(self) -> int:
        """Number of requests sent to it that have not finished."""
        scheduler = self.scheduler
        return (
            len(self._sent)
            + len(scheduler.waiting)
            + len(scheduler.running)
            + len(scheduler.loading)
        )

    @property
    def tokens(self) -> int:
        """Prompt tokens of these requests."""
        scheduler = self.scheduler
        queued = sum(
            [
                sequence.prompt
                for sequence in (*scheduler.waiting, *scheduler.running, *scheduler.loading)
            ]
        )
        return queued + sum([request.num_tokens for request in self._sent])

    def cached(self, request: Request, now: int) -> int:
        """Return the prompt tokens of a request that it would reuse now."""
        plan: ReusePlan = self.scheduler.policy.match(request, now)
        return plan.reused

    # -- the loop ----------------------------------------------------------------------------------

    @property
    def step_ends(self) -> int | None:
        """When its step ends, or now at the latest where the next is about to begin; None without
        work."""
        return None if self.scheduler.idle and not self._sent else self._step_ends

    def _serve(self, server: Server) -> Events:
        self._backend.resume()
        while True:
            now = int(self._env.now)
            self._hand_over(now)
            if self.scheduler.idle:  # what arrives now is then taken too
                self._hand_over(now + 1)
            self._changing(now)
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
        """Return the event of the next request, or of the end of a load that a request waits
        for."""
        self._wake = self._env.event()
        loaded = None if self._loads is None else self._loads.next_arrival()
        if loaded is None:
            assert self.scheduler.idle, "requests wait, memory is free, and nothing was planned"
            return self._wake
        self._step_ends = loaded
        return self._wake | self._env.timeout(loaded - now)

    def _hand_over(self, before: int) -> None:
        while self._sent and self._sent[0].arrived_at < before:
            self.scheduler.add(self._sent.popleft())

    def _run(self, step: ScheduledStep, now: int, server: Server) -> Events:
        # a step may repeat until a request may arrive or a load ends
        arrival = self._sent[0].arrived_at if self._sent else server.next_arrival(self)
        loaded = None if self._loads is None else self._loads.next_arrival()
        deadline_ns = min(
            [time - now for time in (arrival, loaded) if time is not None], default=None
        )
        result = self._backend.execute(step, deadline_ns)
        if self._loads is not None:
            result = replace(result, duration_ns=self._loads.step_duration(result.duration_ns))
        if result.repeats > 1:
            self.scheduler.repeat(
                step, result.repeats, lambda repeat: self._changing(now + result.end_of(repeat))
            )
        for observer in self.observers:
            observer.ran(step, now, result)
        self._step_ends = now + result.duration_ns
        yield self._env.timeout(result.duration_ns)
        self.busy_ns += result.duration_ns
        self.steps += step.repeats
        now = int(self._env.now)
        self._changing(now)
        self.scheduler.complete(step, now, result.finished, result.accepted)
        self._backend.completed(step)
        for observer in self.observers:
            observer.stored(step)
        for sequence in result.finished:
            for observer in self.observers:
                observer.finished(self._number, sequence)
            server.finished(sequence)

    def _changing(self, now: int) -> None:
        for observer in self.observers:
            observer.changing(self._number, now)


def route_to_first(request: Request, now: int) -> int:
    """Route to the only replica."""
    return 0


class Server:
    """Sends each request to a replica when it arrives, and passes finished requests to the source.

    A request that arrives when steps end is routed after they have ended, so that the router sees
    their effects.
    """

    def __init__(
        self,
        env: simpy.Environment,
        source: Source,
        replicas: Ordered[Replica],
        route: Route = route_to_first,
    ) -> None:
        self._env, self._source, self._route = env, source, route
        self.replicas = replicas
        self._timer: simpy.Event | None = None
        self._timer_at = 0
        self._in_flight = 0
        self._is_idle = False
        for replica in replicas:
            replica.start(self)

    def run(self) -> None:
        """Serve until every request has finished."""
        for _ in self.pauses():
            pass

    def pauses(self) -> Iterator[None]:
        """Serve until every request has finished; yield whenever the last request in flight has
        finished.

        Time spent at such a pause is part of no step.
        """
        self._send_arrived()
        while self._env.peek() < math.inf:
            self._env.step()
            if self._is_idle:
                self._is_idle = False
                yield
        for replica in self.replicas:
            replica.close()

    def next_arrival(self, replica: Replica) -> int | None:
        """Return the earliest time at which a request may be sent to this replica during its next
        step; None: never.

        That is when the next request arrives, or when the step of another replica ends and may let
        one arrive.
        """
        next_at = self._source.next_at
        if len(self.replicas) == 1 or not self._source.reacts:
            return next_at
        ends = [other.step_ends for other in self.replicas if other is not replica]
        return min([time for time in (next_at, *ends) if time is not None], default=None)

    def finished(self, sequence: ScheduledSequence) -> None:
        """Note the end of a request; requests that it lets arrive now are sent once the replica has
        continued."""
        self._source.finished(sequence.request, int(self._env.now))
        self._in_flight -= 1
        self._is_idle = self._in_flight == 0
        self._set_timer()

    def _on_due(self, timer: simpy.Event) -> None:
        """Route once the steps that end now have ended: their events were made before this time,
        the next one now."""
        if timer is self._timer:  # an earlier arrival may have replaced it
            self._timer = self._call_after(0, self._on_steps_ended)

    def _on_steps_ended(self, timer: simpy.Event) -> None:
        if timer is self._timer:
            self._timer = None
            self._send_arrived()

    def _send_arrived(self) -> None:
        now = int(self._env.now)
        while (request := self._source.take(now)) is not None:
            self._in_flight += 1
            self.replicas[self._route(request, now)].send(request)
        self._set_timer()

    def _set_timer(self) -> None:
        due = self._source.next_at
        if due is None or (self._timer is not None and self._timer_at <= due):
            return
        self._timer_at = due
        self._timer = self._call_after(max(0, due - int(self._env.now)), self._on_due)

    def _call_after(self, delay_ns: int, callback: Callable[[simpy.Event], None]) -> simpy.Event:
        event = self._env.timeout(delay_ns)
        assert event.callbacks is not None, "a pending event has callbacks"
        event.callbacks.append(callback)
        return event

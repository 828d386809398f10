"""The serving loop: requests arrive, a router sends them to replicas. Time is integer nanoseconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered

import simpy

from spanlab.core.request import Request
from spanlab.core.scheduled import Sequence
from spanlab_sim.replica import Replica
from spanlab_sim.routing import Route
from spanlab_sim.source import Source


def route_to_first(request: Request, now: int) -> int:
    """Route to the only replica."""
    return 0


class Server:
    """Sends each request to a replica when it arrives, and passes finished requests to the source.

    A request that arrives when steps end is routed after they have ended, so that the router sees their effects.
    """

    def __init__(
        self, env: simpy.Environment, source: Source, replicas: Ordered[Replica], route: Route = route_to_first
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
        """Serve until every request has finished; yield whenever the last request in flight has finished.

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
        """Return the earliest time at which a request may be sent to this replica during its next step; None: never.

        That is when the next request arrives, or when the step of another replica ends and may let one arrive.
        """
        next_at = self._source.next_at
        if len(self.replicas) == 1 or not self._source.reacts:
            return next_at
        ends = [other.step_ends for other in self.replicas if other is not replica]
        return min([time for time in (next_at, *ends) if time is not None], default=None)

    def finished(self, sequence: Sequence) -> None:
        """Note the end of a request; requests that it lets arrive now are sent once the replica has continued."""
        self._source.finished(sequence.request, int(self._env.now))
        self._in_flight -= 1
        self._is_idle = self._in_flight == 0
        self._set_timer()

    def _on_due(self, timer: simpy.Event) -> None:
        """Route once the steps that end now have ended: their events were made before this time, the next one now."""
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

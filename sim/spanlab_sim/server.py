"""The serving loop: requests arrive, a router sends them to replicas. Time is integer nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import simpy

from spanlab.core.request import Request
from spanlab.core.scheduled import Sequence
from spanlab_sim.replica import Replica
from spanlab_sim.routing import Route
from spanlab_sim.source import Source


def to_the_first(request: Request, now: int) -> int:
    """The only replica that there is."""
    return 0


class Server:
    """Sends each request to a replica when it arrives, and tells the source what has finished."""

    def __init__(
        self, env: simpy.Environment, source: Source, replicas: Ordered[Replica], route: Route = to_the_first
    ) -> None:
        self._env, self._source, self._route = env, source, route
        self.replicas = replicas
        self._timer: simpy.Event | None = None
        self._timer_at = 0
        for replica in replicas:
            replica.start(self)

    def run(self) -> None:
        """Serve until every request has finished."""
        self._send_due()
        self._env.run()
        for replica in self.replicas:
            replica.close()

    def next_arrival(self, replica: Replica) -> int | None:
        """When the next request arrives, and no later than another replica may let one arrive, since it might be sent
        here."""
        known = self._source.next_at
        if len(self.replicas) == 1 or not self._source.reacts:
            return known
        ends = [other.step_ends for other in self.replicas if other is not replica]
        return min([at for at in (known, *ends) if at is not None], default=None)

    def finished(self, sequence: Sequence) -> None:
        """Note the end of a request; those that it lets arrive now are sent when the replica has gone on."""
        self._source.finished(sequence.request, int(self._env.now))
        self._set_timer()

    def _on_timer(self, timer: simpy.Event) -> None:
        if timer is self._timer:  # not one that an earlier arrival has replaced
            self._timer = None
            self._send_due()

    def _send_due(self) -> None:
        now = int(self._env.now)
        while (request := self._source.take(now)) is not None:
            self.replicas[self._route(request, now)].send(request)
        self._set_timer()

    def _set_timer(self) -> None:
        due = self._source.next_at
        if due is None or (self._timer is not None and self._timer_at <= due):
            return
        now = int(self._env.now)
        self._timer, self._timer_at = self._env.timeout(max(0, due - now)), due
        assert self._timer.callbacks is not None, "of an event that has not happened"
        self._timer.callbacks.append(self._on_timer)

"""The next request to arrive: at its recorded time, or some time after the requests that it waits for."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Ordered
from dataclasses import replace

from spanlab.core.request import Request
from spanlab_sim.followers import Followers


class Source:
    """Requests in order of arrival; the end of a request may let others arrive.

    A request without `after` arrives at its `arrived_at`. Another arrives `wait_ns` after the last request that it
    names has finished, and not before its `arrived_at`. At equal times those without `after` come first, and then
    the one that stands first in `requests`.

    `requests`  those without `after` sorted by arrival; ValueError where `after` cannot be satisfied
    `clients`   most requests in flight: a further one arrives when one of them finishes; None is no limit
    `warmup`    number of the first requests to arrive whose ids are recorded in `early`
    """

    def __init__(self, requests: Ordered[Request], clients: int | None = None, warmup: int = 0) -> None:
        self._independent, self._num_taken = requests, 0
        self._followers: Followers | None = None
        self._released: list[tuple[int, int, Request]] = []  # a heap by time, then by rank
        if any(request.after for request in requests):
            self._independent, self._followers = [r for r in requests if not r.after], Followers(requests)
        self.early: set[int] = set()
        self._warmup = warmup
        self._in_flight, self._clients = 0, len(requests) if clients is None else clients

    @property
    def reacts(self) -> bool:
        """Whether the end of a request may let another one arrive."""
        if self._followers is not None and self._followers.waiting:
            return True
        return self._in_flight >= self._clients and (self._independent_at is not None or bool(self._released))

    @property
    def next_at(self) -> int | None:
        """When the next request arrives, or could have arrived; None where none does before another finishes."""
        if self._in_flight >= self._clients:
            return None
        free = self._independent_at
        if not self._released:
            return free
        return self._released[0][0] if free is None else min(free, self._released[0][0])

    @property
    def _independent_at(self) -> int | None:
        return self._independent[self._num_taken].arrived_at if self._num_taken < len(self._independent) else None

    def take(self, now: int) -> Request | None:
        """Return a request that arrives at `now`, with this time; None where no further one does."""
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
                heapq.heappush(self._released, (max(follower.arrived_at, now + follower.wait_ns), rank, follower))

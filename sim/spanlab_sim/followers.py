"""Requests that wait for other requests to finish: turns of a session, and steps of an agent that join several."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from graphlib import CycleError, TopologicalSorter

from spanlab.core.request import Request


class Followers:
    """Requests that wait for others; raises ValueError as `check_after` does."""

    def __init__(self, requests: Ordered[Request]) -> None:
        check_after(requests)
        self._num_awaited: dict[int, int] = {}  # by waiting request: requests that it still awaits
        self._waiting_for: dict[int, list[tuple[int, Request]]] = {}  # by request: its followers, with their ranks
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
    """Raise ValueError for requests that could never arrive, or would arrive before those they wait for."""
    ids = {request.id for request in requests}
    for request in requests:
        if unknown := set(request.after) - ids:
            raise ValueError(
                f"request.after={request.after} of request {request.id}: expected ids of requests, "
                f"there is no request {min(unknown)}"
            )
        if request.wait_ns < 0:
            raise ValueError(f"request.wait_ns={request.wait_ns} of request {request.id}: expected 0 or more")
    try:
        TopologicalSorter({request.id: request.after for request in requests}).prepare()
    except CycleError as error:
        circle = " waits for ".join(str(number) for number in reversed(error.args[1]))
        raise ValueError(f"request.after of request {circle}: expected requests that finish before it") from None

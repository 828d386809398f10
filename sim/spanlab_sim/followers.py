"""Requests that wait for others to finish: turns of a session, and steps of an agent that join several."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from graphlib import CycleError, TopologicalSorter

from spanlab.core.request import Request


class Followers:
    """Which requests wait for which; ValueError as in `check_after`."""

    def __init__(self, requests: Ordered[Request]) -> None:
        check_after(requests)
        self._left: dict[int, int] = {}  # by request that waits: how many others it still waits for
        self._of: dict[int, list[tuple[int, Request]]] = {}  # by request: those that wait for it, with their ranks
        for rank, request in enumerate(requests):
            if request.after:
                self._left[request.id] = len(set(request.after))
            for other in set(request.after):
                self._of.setdefault(other, []).append((rank, request))

    @property
    def waiting(self) -> bool:
        """Whether any request waits for another."""
        return bool(self._left)

    def released_by(self, finished: int) -> list[tuple[int, Request]]:
        """Requests, with their ranks, that have waited for this one last."""
        released = []
        for rank, request in self._of.pop(finished, ()):
            self._left[request.id] -= 1
            if not self._left[request.id]:
                del self._left[request.id]
                released.append((rank, request))
        return released


def check_after(requests: Ordered[Request]) -> None:
    """Refuse requests that could never arrive, or would arrive before what they wait for has finished."""
    known = {request.id for request in requests}
    for request in requests:
        if unknown := set(request.after) - known:
            raise ValueError(
                f"request.after={request.after} of request {request.id}: expected ids of requests, "
                f"there is no request {min(unknown)}"
            )
        if request.wait_ns < 0:
            raise ValueError(f"request.wait_ns={request.wait_ns} of request {request.id}: expected 0 or more")
    try:
        TopologicalSorter({request.id: request.after for request in requests}).prepare()
    except CycleError as error:
        circle = " waits for ".join(str(one) for one in reversed(error.args[1]))
        raise ValueError(f"request.after of request {circle}: expected requests that finish before it") from None

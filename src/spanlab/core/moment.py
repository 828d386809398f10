"""Time and request of a store's current operation, for eviction orders that depend on time or on requests."""

from __future__ import annotations

from spanlab.core.request import Request


class Moment:
    """The time of the last operation of a store, in nanoseconds on the clock of the run, and its request."""

    def __init__(self) -> None:
        self.now = 0
        self.request: Request | None = None

"""A policy for use by many threads.

A policy is not safe under threads: entries that a plan has matched may be evicted before it is allocated. Here
planning and allocation are one operation, and one lock is held around each operation. So every history is that of a
sequence of operations, in the order in which they acquired the lock.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

from spanlab.core.protocol import Policy
from spanlab.core.request import Request


class SharedPolicy:
    """A policy whose operations run one at a time; arguments and results are those of `Policy`."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._lock = policy, Lock()

    def admit(self, request: Request, now: int, generated: int = 0) -> Any:
        """Plan and allocate; None, and no change, where the request does not fit."""
        with self._lock:
            self._policy.start_step(now)
            plan = self._policy.match(request, now, generated)
            return self._policy.allocate(plan, now, generated)

    def reusable(self, request: Request, now: int) -> int:
        """Return the tokens that a request would reuse now; read-only."""
        with self._lock:
            reused: int = self._policy.match(request, now).reused
            return reused

    def append(self, allocation: Any, start: int, stop: int, drafts: int = 0) -> bool:
        """Reserve memory for tokens `[start, stop)`; False where memory is short."""
        with self._lock:
            return self._policy.append(allocation, start, stop, drafts)

    def insert(self, allocation: Any, computed: int, now: int, cache_span: int = 0) -> None:
        """Store the computed tokens of a cache span, up to prompt token `computed`."""
        with self._lock:
            self._policy.insert(allocation, computed, now, cache_span)

    def finish(self, allocation: Any, generated: int, now: int) -> None:
        """Store output tokens of a finished request, and free its memory."""
        with self._lock:
            self._policy.finish(allocation, generated, now)
            self._policy.free(allocation, now)

    def free(self, allocation: Any, now: int) -> None:
        """Free the memory of a request that has not finished."""
        with self._lock:
            self._policy.free(allocation, now)

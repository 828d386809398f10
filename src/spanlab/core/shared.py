"""One policy for many threads.

A policy is not safe under threads: what a plan has found may leave before it is allocated. Here a plan is made and
allocated in one operation, and one lock is held around each operation. So every history is that of some sequence of
operations, in the order in which they got the lock.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

from spanlab.core.protocol import Policy
from spanlab.core.request import Request


class SharedPolicy:
    """Operations of a policy, one at a time; arguments and results are those of `Policy`."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._lock = policy, Lock()

    def admit(self, request: Request, now: int, generated: int = 0) -> Any:
        """Plan and allocate; None, and no change, where the request does not fit."""
        with self._lock:
            self._policy.start_step(now)
            plan = self._policy.match(request, now, generated)
            return self._policy.allocate(plan, now, generated)

    def reusable(self, request: Request, now: int) -> int:
        """Tokens that a request would reuse at this moment; changes nothing."""
        with self._lock:
            reused: int = self._policy.match(request, now).reused
            return reused

    def append(self, allocation: Any, start: int, stop: int, drafts: int = 0) -> bool:
        """Give a request memory for tokens `[start, stop)`; False where there is none."""
        with self._lock:
            return self._policy.append(allocation, start, stop, drafts)

    def insert(self, allocation: Any, computed: int, now: int, cache_span: int = 0) -> None:
        """Keep what has been computed of a cache span, up to prompt token `computed`."""
        with self._lock:
            self._policy.insert(allocation, computed, now, cache_span)

    def finish(self, allocation: Any, generated: int, now: int) -> None:
        """Keep output tokens of a request that has ended, and take back all that it holds."""
        with self._lock:
            self._policy.finish(allocation, generated, now)
            self._policy.free(allocation, now)

    def free(self, allocation: Any, now: int) -> None:
        """Take back all that a request holds, which has not ended."""
        with self._lock:
            self._policy.free(allocation, now)

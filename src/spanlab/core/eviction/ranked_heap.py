"""A heap of entries by a rank that may fall at a use, so that each is offered again at every use."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic

from spanlab.core.eviction.contract import Kind, RankedT
from spanlab.core.eviction_queue import Key


class RankedHeap(Generic[RankedT]):
    """Entries by lowest rank; one may be in the heap several times. Stale ranks are corrected at the top."""

    def __init__(self, kind: Kind[RankedT], rank: Callable[[RankedT], Key]) -> None:
        self._may_leave, self._rank = kind.may_leave, rank
        self._heap: list[tuple[Key, int, RankedT]] = []
        self._pushed = 0

    def offer(self, item: RankedT) -> None:
        """Add an entry by its current rank, unless it is locked or no longer stored."""
        if self._may_leave(item):
            self._pushed += 1
            heapq.heappush(self._heap, (self._rank(item), self._pushed, item))

    def lowest(self) -> tuple[Key, RankedT] | None:
        """Return (rank, entry) of the lowest rank without removing it; None where none can be evicted."""
        while self._heap:
            rank, pushed, item = self._heap[0]
            if not self._may_leave(item):
                heapq.heappop(self._heap)
            elif (current := self._rank(item)) != rank:
                heapq.heapreplace(self._heap, (current, pushed, item))
            else:
                return rank, item
        return None

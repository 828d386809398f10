"""A queue of evictable entries, ordered by rank.

A rank never decreases while its entry is stored. So the heap may hold stale ranks, which are corrected at its top.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from spanlab.core.tree import Node, State

Key = tuple[float, ...]


class Ranked(Protocol):
    """An entry of an eviction queue."""

    serial: int
    locks: int
    used: int
    uses: int
    in_heap: bool


T = TypeVar("T", bound=Ranked)


class EvictionQueue(Generic[T]):
    """Evictable entries, lowest rank first; stale ranks are corrected at the top of the heap.

    A rank ends in a serial number, so that no two entries have equal ranks.
    """

    def __init__(self, rank: Callable[[T], Key], may_leave: Callable[[T], bool]) -> None:
        self._rank, self._may_leave = rank, may_leave
        self._heap: list[tuple[Key, T]] = []

    def offer(self, item: T) -> None:
        """Add an entry, unless it is queued already or not evictable."""
        if not item.in_heap and self._may_leave(item):
            self.add([item])

    def add(self, items: Iterable[T]) -> None:
        """Add evictable entries that are not queued."""
        for item in items:
            item.in_heap = True
            heapq.heappush(self._heap, (self._rank(item), item))

    def used(self, items: Iterable[T]) -> None:
        """Do nothing: ranks are recomputed at the top of the heap."""

    def renewed(self, items: Iterable[T]) -> None:
        """Do nothing: ranks are recomputed at the top of the heap."""

    def removed(self, item: T) -> None:
        """Do nothing: removed entries are dropped at the top of the heap."""

    def lowest(self) -> tuple[Key, T] | None:
        """Return (rank, entry) of the lowest rank, which stays queued; None where no entry is evictable."""
        heap, rank = self._heap, self._rank
        while heap:
            key, item = heap[0]
            current = rank(item)
            if current != key:
                heapq.heapreplace(heap, (current, item))
            elif self._may_leave(item):
                return heap[0]
            else:
                heapq.heappop(heap)
                item.in_heap = False
        return None


def leaf_may_leave(node: Node) -> bool:
    """Whether a node is in the tree, unlocked and without children."""
    return not (node.children or node.locks or node.parent is None)


def state_may_leave(state: State) -> bool:
    """Whether a state is in the tree and unlocked."""
    return not state.locks and state.node is not None

"""What may be evicted, in order.

Keys never decrease while a node lives, which is what lets a queue keep stale keys and correct them when they surface.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from spanlab.core.tree import Node, State

Key = tuple[float, ...]


class Ranked(Protocol):
    """What an eviction queue holds."""

    serial: int
    locks: int
    used: int
    uses: int
    in_heap: bool


T = TypeVar("T", bound=Ranked)


class EvictionQueue(Generic[T]):
    """Entries that may be evicted, lowest rank first; stale ranks are corrected when they surface.

    A rank ends in a serial number, so that no two entries have the same one.
    """

    def __init__(self, rank: Callable[[T], Key], may_leave: Callable[[T], bool]) -> None:
        self._rank, self._may_leave = rank, may_leave
        self._heap: list[tuple[Key, T]] = []

    def offer(self, item: T) -> None:
        """Add an entry, unless it is there or may not leave."""
        if not item.in_heap and self._may_leave(item):
            self.add([item])

    def add(self, items: Iterable[T]) -> None:
        """Add entries that are not there and may leave."""
        for item in items:
            item.in_heap = True
            heapq.heappush(self._heap, (self._rank(item), item))

    def used(self, items: Iterable[T]) -> None:
        """A rank is read when it surfaces."""

    def renewed(self, items: Iterable[T]) -> None:
        """A rank is read when it surfaces."""

    def removed(self, item: T) -> None:
        """What has gone is dropped when it surfaces."""

    def lowest(self) -> tuple[Key, T] | None:
        """The entry of the lowest rank as (rank, entry), still in the queue."""
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
    """Whether a node is in the tree, unused, and has nothing below it."""
    return not (node.children or node.locks or node.parent is None)


def state_may_leave(state: State) -> bool:
    """Whether a state is in the tree and unused."""
    return not state.locks and state.node is not None

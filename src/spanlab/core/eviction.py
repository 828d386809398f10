"""Who leaves first: an eviction order is one sort key for leaves and one for states, smallest first.

Keys never decrease while a node lives, which is what lets the store keep stale keys in its heaps and correct them
when they surface.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from spanlab.core.tree import Node, State

Key = tuple[int, int, int]


class EvictionOrder(NamedTuple):
    """`leaf` ranks leaves by the use of their KV, `state` ranks states by their own use; ties go by age.

    `whole_leaves`  a state at an unused leaf leaves with the leaf's KV; else a state leaves alone
    """

    leaf: Callable[[Node], Key]
    state: Callable[[State], Key]
    whole_leaves: bool = False


LRU = EvictionOrder(lambda n: (n.used, 0, n.serial), lambda s: (s.used, 0, s.serial))

EVICTION_ORDERS = {
    "fifo": EvictionOrder(lambda n: (n.created, 0, n.serial), lambda s: (s.created, 0, s.serial)),
    "lru": LRU,
    "lru_whole_leaves": LRU._replace(whole_leaves=True),
    "lfu": EvictionOrder(lambda n: (n.uses, n.used, n.serial), lambda s: (s.uses, s.used, s.serial)),
}


class Ranked(Protocol):
    """What an eviction queue holds."""

    serial: int
    in_heap: bool


T = TypeVar("T", bound=Ranked)


class EvictionQueue(Generic[T]):
    """Entries that may be evicted, lowest rank first; stale ranks are corrected when they surface."""

    def __init__(self, rank: Callable[[T], Key], may_leave: Callable[[T], bool]) -> None:
        self._rank, self._may_leave = rank, may_leave
        self._heap: list[tuple[Key, int, T]] = []

    def offer(self, item: T) -> None:
        """Add an entry, unless it is there or may not leave."""
        if not item.in_heap and self._may_leave(item):
            item.in_heap = True
            heapq.heappush(self._heap, (self._rank(item), item.serial, item))

    def lowest(self) -> tuple[Key, int, T] | None:
        """The entry of the lowest rank as (rank, serial, entry), still in the queue."""
        heap, rank, may_leave = self._heap, self._rank, self._may_leave
        while heap:
            key, serial, item = heap[0]
            if not may_leave(item):
                heapq.heappop(heap)
                item.in_heap = False
                continue
            current = rank(item)
            if current == key:
                return heap[0]
            heapq.heapreplace(heap, (current, serial, item))
        return None


def leaf_may_leave(node: Node) -> bool:
    """Whether a node is in the tree, unused, and has nothing below it."""
    return not (node.children or node.locks or node.parent is None)


def state_may_leave(state: State) -> bool:
    """Whether a state is in the tree and unused."""
    return not state.locks and state.node is not None

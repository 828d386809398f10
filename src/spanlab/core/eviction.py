"""Who leaves first: an eviction order is one sort key for leaves and one for states, smallest first.

Keys never decrease while a node lives, which is what lets the store keep stale keys in its heaps and correct them
when they surface.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

from spanlab.core.tree import Node, State
from spanlab.registry import Registry

Key = tuple[int, ...]


class EvictionOrder(NamedTuple):
    """`leaf` ranks leaves by the use of their KV, `state` ranks states by their own use; ties go by age.

    `whole_leaves`  a state at an unused leaf leaves with the leaf's KV; else a state leaves alone
    """

    leaf: Callable[[Node], Key]
    state: Callable[[State], Key]
    whole_leaves: bool = False


def _by(*names: str) -> EvictionOrder:
    key = attrgetter(*names, "serial")
    return EvictionOrder(key, key)


EVICTION_ORDERS: Registry[EvictionOrder] = Registry("eviction order")


@EVICTION_ORDERS.register("fifo")
def fifo() -> EvictionOrder:
    """The oldest entry first."""
    return _by("created")


@EVICTION_ORDERS.register("lru")
def lru() -> EvictionOrder:
    """The longest unused entry first."""
    return _by("used")


@EVICTION_ORDERS.register("lru_whole_leaves")
def lru_whole_leaves() -> EvictionOrder:
    """As lru; a state at an unused leaf leaves with the leaf's KV."""
    return lru()._replace(whole_leaves=True)


@EVICTION_ORDERS.register("lfu")
def lfu() -> EvictionOrder:
    """The least used entry first; among equals the longest unused."""
    return _by("uses", "used")


class Ranked(Protocol):
    """What an eviction queue holds."""

    serial: int
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

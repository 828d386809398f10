"""Who leaves first: an eviction order is one sort key for leaves and one for states, smallest first.

Keys never decrease while a node lives, which is what lets the store keep stale keys in its heaps and correct them
when they surface.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from spanlab.core.tree import Node, State

Key = tuple[int, int, int]


class EvictionOrder(NamedTuple):
    """`leaf` ranks leaves by the use of their KV, `state` ranks states by their own use; ties go by age."""

    leaf: Callable[[Node], Key]
    state: Callable[[State], Key]


EVICTION_ORDERS = {
    "fifo": EvictionOrder(lambda n: (n.created, 0, n.serial), lambda s: (s.created, 0, s.serial)),
    "lru": EvictionOrder(lambda n: (n.used, 0, n.serial), lambda s: (s.used, 0, s.serial)),
    "lfu": EvictionOrder(lambda n: (n.uses, n.used, n.serial), lambda s: (s.uses, s.used, s.serial)),
}

"""Orders by one rank per entry, which never decreases."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from spanlab.core.eviction.contract import EVICTION_ORDERS, EvictionOrder, ranked


def _by(*names: str, **options: Any) -> EvictionOrder:
    key = attrgetter(*names, "serial")
    return ranked(key, key, **options)


@EVICTION_ORDERS.register("fifo")
def fifo() -> EvictionOrder:
    """The oldest entry first."""
    return _by("created")


@EVICTION_ORDERS.register("lru")
def lru() -> EvictionOrder:
    """The least recently used entry first."""
    return _by("used")


@EVICTION_ORDERS.register("lru_whole_leaves")
def lru_whole_leaves() -> EvictionOrder:
    """As `lru`; a state at an unused leaf is evicted with the leaf's KV."""
    return _by("used", whole_leaves=True)


@EVICTION_ORDERS.register("lfu")
def lfu() -> EvictionOrder:
    """The entry with fewest uses first; ties by least recent use."""
    return _by("uses", "used")

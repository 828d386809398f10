"""Orders by one rank of an entry that never decreases."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from spanlab.core.eviction.contract import EVICTION_ORDERS, EvictionOrder, ranked


def _by(*names: str, **more: Any) -> EvictionOrder:
    key = attrgetter(*names, "serial")
    return ranked(key, key, **more)


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
    return _by("used", whole_leaves=True)


@EVICTION_ORDERS.register("lfu")
def lfu() -> EvictionOrder:
    """The least used entry first; among equals the longest unused."""
    return _by("uses", "used")

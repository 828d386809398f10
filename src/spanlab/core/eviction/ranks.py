"""Orders by one rank per entry, which never decreases.

Ranks of leaves by length or depth: SGLang's forks and studies of prefix caches.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from spanlab.core.eviction.contract import EVICTION_ORDERS, EvictionOrder, ranked
from spanlab.core.eviction_queue import Key
from spanlab.core.tree import Node

_BY_USE = attrgetter("used", "serial")


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


def _longest(node: Node) -> Key:
    return node.start - node.depth, node.used, node.serial


@EVICTION_ORDERS.register("longest")
def longest() -> EvictionOrder:
    """The longest leaf first, which frees most memory at once; ties, and states, by least recent use."""
    return ranked(_longest, _BY_USE, by_block=True)


@EVICTION_ORDERS.register("shallowest")
def shallowest() -> EvictionOrder:
    """The leaf at the smallest depth first, whose tokens attend to fewest others; else as `longest`."""
    return ranked(attrgetter("depth", "used", "serial"), _BY_USE)

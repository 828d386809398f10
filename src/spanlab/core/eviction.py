"""Who leaves first: an eviction order is one sort key for leaves and one for states, smallest first."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from spanlab.core.eviction_queue import Key
from spanlab.core.tree import Node, State
from spanlab.registry import Registry


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

"""Leaves by their length or depth, as SGLang's forks and studies of prefix caches rank them."""

from __future__ import annotations

from spanlab.core.eviction.contract import EVICTION_ORDERS, EvictionOrder, ranked
from spanlab.core.eviction_queue import Key
from spanlab.core.tree import Node, State


def _by_use(state: State) -> Key:
    return state.used, state.serial


def _longest(node: Node) -> Key:
    return node.start - node.depth, node.used, node.serial


def _shallowest(node: Node) -> Key:
    return node.depth, node.used, node.serial


@EVICTION_ORDERS.register("longest")
def longest() -> EvictionOrder:
    """The longest leaf first, which frees most memory at once; ties, and states, by least recent use."""
    return ranked(_longest, _by_use)


@EVICTION_ORDERS.register("shallowest")
def shallowest() -> EvictionOrder:
    """The leaf at the smallest depth first, whose tokens attend to fewest others; else as `longest`."""
    return ranked(_shallowest, _by_use)

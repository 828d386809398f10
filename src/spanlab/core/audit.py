"""A recount of a store from scratch, for tests and idle moments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from spanlab.core.store import Store
from spanlab.core.tree import Node


def recount(store: Store, roots: Iterable[Node]) -> None:
    """Recount everything under `roots` and compare with the store's counters; slow, for tests and idle moments."""
    nodes = [node for root in roots for node in _descendants(root)]
    sizes = [(node.depth - node.start) * store.token_bytes for node in nodes]
    states = [state for node in nodes for state in node.states]
    assert store.kv_cached == sum(sizes), "cached KV bytes are miscounted"
    locked = [size for node, size in zip(nodes, sizes, strict=True) if node.locks]
    assert store.kv_locked == sum(locked), "locked KV bytes are miscounted"
    assert store.state_cached == sum(state.num_bytes for state in states), "cached state bytes are miscounted"
    in_use = sum(state.num_bytes for state in states if state.locks)
    assert store.state_locked == in_use, "locked state bytes are miscounted"
    assert store.entries == sum(not node.children for node in nodes), "entries are miscounted"
    for node in nodes:
        _check_node(node, store.tree.block_size)
    kv, state = store.kv_cached + store.kv_reserved, store.state_cached + store.state_reserved
    assert kv <= store.budget.kv_bytes and state <= store.budget.state_bytes, "over a budget"
    assert kv + state <= store.budget.total_bytes and store.entries <= store.budget.entries, "over a budget"


def _descendants(root: Node) -> Iterator[Node]:
    pending = list(root.children.values())
    while pending:
        node = pending.pop()
        pending.extend(node.children.values())
        yield node


def _check_node(node: Node, block_size: int) -> None:
    assert node.parent is not None and node.parent.depth == node.start, "a node does not start where its parent ends"
    assert len(node.edge) == node.depth - node.start and node.depth % block_size == 0, "an edge is off its block"
    assert node.parent.children[node.key] is node, "a child has another key than its parent's entry for it"
    assert node.locks >= sum(child.locks for child in node.children.values()), "locks do not reach the ancestors"
    positions = [state.position for state in node.states]
    for values in (positions, node.lost):
        assert values == sorted(set(values)), "positions are not increasing"
        assert all(node.start < position <= node.depth for position in values), "a state lies outside its node"
    assert not set(positions) & set(node.lost), "a state is both here and lost"
    assert all(state.node is node for state in node.states), "a state points to another node"

"""A cap on the states of one path, so that the checkpoints of one long prompt do not displace all others.

Source: sgl-project/sglang#31230. The cap is soft: states that other requests are likely to need are not dropped.
"""

from __future__ import annotations

from spanlab.core.tree import Node, State


def excess_states(end: Node, limit: int) -> list[State]:
    """Return the states to drop from a path with more than `limit` states, shallowest first.

    The deepest state of the path is not dropped, nor are states in use, nor states at the end of a leaf or at a fork,
    where several stored prefixes continue.
    """
    path = list(end.path())
    states = [state for node in reversed(path) for state in node.states]
    excess = len(states) - limit
    if excess <= 0:
        return []
    return [state for state in states[:-1] if not _is_protected(state)][:excess]


def _is_protected(state: State) -> bool:
    node = state.node
    assert node is not None, "a state of the tree has a node"
    return state.locks > 0 or (state.position == node.depth and len(node.children) != 1)

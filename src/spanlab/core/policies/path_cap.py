"""A cap on the states of one path: an unbounded number of checkpoints of one long prompt would crowd out all others.

Source: sgl-project/sglang#31230. It leaves what others are likely to need, so that the cap is a soft one.
"""

from __future__ import annotations

from spanlab.core.tree import Node, State


def surplus(end: Node, most: int) -> list[State]:
    """The shallowest states of a path by which it has more than `most`, as far as they may leave; shallowest first.

    The deepest state of the path stays, as do states in use, and those at the end of a leaf or of a fork, where more
    than one stored prefix goes on.
    """
    path = list(end.path())
    states = [state for node in reversed(path) for state in node.states]
    excess = len(states) - most
    if excess <= 0:
        return []
    return [state for state in states[:-1] if not _is_spared(state)][:excess]


def _is_spared(state: State) -> bool:
    node = state.node
    assert node is not None, "a state of the tree has a node"
    return state.locks > 0 or (state.position == node.depth and len(node.children) != 1)

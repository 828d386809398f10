"""Names of entries that stay the same when an entry leaves and is stored again."""

from __future__ import annotations

from hashlib import blake2b

from spanlab.core.tree import Node, State


class PathNames:
    """Digests of paths, which do not depend on where edges are cut; a watcher of the tree.

    A node is named as the tree finds it: by the path above it, and its first block.
    """

    def __init__(self) -> None:
        self._known: dict[Node, blake2b] = {}

    def of_node(self, node: Node) -> bytes:
        """The name of a node that is in the tree."""
        assert node.parent is not None, "a node is named while it is in the tree"
        return self._upto(node.parent).digest() + node.key

    def of_state(self, state: State) -> bytes:
        """The name of a stored state: the tokens that it has read."""
        assert state.node is not None, "a state is named while it is stored"
        return self.of_position(state.node, state.position)

    def of_position(self, node: Node, position: int) -> bytes:
        """The name of a state at a position of a node in the tree: the tokens up to there."""
        assert node.parent is not None and node.start < position <= node.depth, "a position lies on an edge"
        path = self._upto(node.parent).copy()
        path.update(node.edge.cut(0, position - node.start).tobytes())
        return path.digest()

    def split(self, upper: Node, lower: Node) -> None:
        """The digest of a path does not depend on its nodes."""

    def removed(self, node: Node) -> None:
        """Forget a node."""
        self._known.pop(node, None)

    def _upto(self, node: Node) -> blake2b:
        missing = []
        while node not in self._known:
            missing.append(node)
            if node.parent is None:
                break
            node = node.parent
        for one in reversed(missing):
            self._known[one] = self._extended(one)
        return self._known[missing[0] if missing else node]

    def _extended(self, node: Node) -> blake2b:
        if node.parent is None:
            return blake2b(node.key, digest_size=16)
        path = self._known[node.parent].copy()
        path.update(node.edge.tobytes())
        return path

"""Names of entries, the same when an entry is evicted and stored again."""

from __future__ import annotations

from hashlib import blake2b

from spanlab.core.tree import Node, State


class PathNames:
    """Digests of paths, which do not depend on where edges are split; a watcher of the tree.

    A node is named by the path above it and its first block, as the tree looks it up.
    """

    def __init__(self) -> None:
        self._digests: dict[Node, blake2b] = {}

    def of_node(self, node: Node) -> bytes:
        """The name of a node in the tree."""
        assert node.parent is not None, "a node is named while it is in the tree"
        return self._path_digest(node.parent).digest() + node.key

    def of_state(self, state: State) -> bytes:
        """The name of a stored state: the digest of its prefix."""
        assert state.node is not None, "a state is named while it is stored"
        return self.of_position(state.node, state.position)

    def of_position(self, node: Node, position: int) -> bytes:
        """The name of a state at a position on a node's edge: the digest of the tokens up to it."""
        assert node.parent is not None and node.start < position <= node.depth, "a position lies on an edge"
        path = self._path_digest(node.parent).copy()
        path.update(node.edge.cut(0, position - node.start).tobytes())
        return path.digest()

    def split(self, upper: Node, lower: Node) -> None:
        """Do nothing: the digest of a path does not depend on its nodes."""

    def removed(self, node: Node) -> None:
        """Forget a node."""
        self._digests.pop(node, None)

    def _path_digest(self, node: Node) -> blake2b:
        missing = []
        while node not in self._digests:
            missing.append(node)
            if node.parent is None:
                break
            node = node.parent
        for new in reversed(missing):
            self._digests[new] = self._extended(new)
        return self._digests[missing[0] if missing else node]

    def _extended(self, node: Node) -> blake2b:
        if node.parent is None:
            return blake2b(node.key, digest_size=16)
        path = self._digests[node.parent].copy()
        path.update(node.edge.tobytes())
        return path

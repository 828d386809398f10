"""A forest of token prefixes: where a stored prefix lies and where a prompt leaves it.

Tokens are handled as bytes (int32, four bytes each): an edge is compared with one memory comparison, sliced without
copying objects, and hashed whole when it is the key of a block.

Two shapes of one structure: with `page` alone an edge is as long as its content allows (radix); with `whole_pages`
every edge is exactly one page (a block table, whose nested keys are the hash chain).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from spanlab.core.request import Tokens

TOKEN_BYTES = 4


def as_bytes(tokens: Tokens) -> bytes:
    """Token ids as the byte string that trees compare; four bytes each, in the machine's order."""
    return np.ascontiguousarray(tokens, dtype=np.int32).tobytes()


def common_prefix(a: bytes, b: bytes) -> int:
    """Length in tokens of the longest common prefix of two token strings."""
    length = min(len(a), len(b)) // TOKEN_BYTES
    if length == 0:
        return 0
    differ = np.frombuffer(a, np.int32, length) != np.frombuffer(b, np.int32, length)
    first = int(differ.argmax())
    return first if differ[first] else length


class Node:
    """Tokens `[start, depth)` of a prefix, and at most one recurrent state, which then stands at `depth`.

    `locks` counts the users of this node and of everything below it, so a locked node's ancestors are locked too.
    """

    __slots__ = (
        "children",
        "created",
        "depth",
        "edge",
        "in_leaf_heap",
        "in_state_heap",
        "locks",
        "parent",
        "serial",
        "start",
        "state",
        "state_created",
        "state_locks",
        "state_lost",
        "state_used",
        "state_uses",
        "used",
        "uses",
    )

    def __init__(self, edge: bytes, start: int, depth: int, parent: Node | None, serial: int, now: int) -> None:
        self.edge, self.start, self.depth, self.parent = edge, start, depth, parent
        self.children: dict[bytes, Node] = {}
        self.serial = serial
        self.locks = self.state_locks = self.uses = self.state_uses = 0
        self.created = self.used = self.state_created = self.state_used = now
        self.state = self.state_lost = self.in_leaf_heap = self.in_state_heap = False

    def path(self) -> Iterator[Node]:
        """This node and its ancestors below the root, deepest first."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent


class PrefixTree:
    """Finds and extends prefixes at page granularity; knows nothing of bytes, budgets or eviction.

    `page`         tokens per page, the unit of matching: lengths returned are multiples of it.
    `whole_pages`  every edge is exactly one page, so sharing and eviction go page by page too.
    """

    def __init__(self, page: int = 1, whole_pages: bool = False) -> None:
        self.page = page
        self._edge_limit = page if whole_pages else None
        self._serial = 0

    def new_root(self) -> Node:
        """A root of its own: prefixes under different roots never meet."""
        return Node(b"", 0, 0, None, 0, 0)

    def match(self, start: Node, tokens: bytes) -> tuple[Node, int]:
        """The deepest node that `tokens` reaches from `start`, which they contain, and the matched length in tokens.

        The length is less than the node's depth when the match ends inside its edge. Changes nothing.
        """
        node, depth, page_bytes = start, start.depth, self.page * TOKEN_BYTES
        while True:
            at = depth * TOKEN_BYTES
            child = node.children.get(tokens[at : at + page_bytes])
            if child is None:
                return node, depth
            end = child.depth * TOKEN_BYTES
            if tokens[at:end] != child.edge:
                common = common_prefix(tokens[at:end], child.edge)
                return child, depth + common // self.page * self.page
            node, depth = child, child.depth

    def extend(self, node: Node, tokens: bytes, stop: int, now: int) -> tuple[Node, int]:
        """Make sure that a node ends at `stop` below `node`, along `tokens`; returns it and the tokens newly added.

        `stop` is a multiple of the page and lies within `tokens`.
        """
        added, page_bytes = 0, self.page * TOKEN_BYTES
        while node.depth < stop:
            at = node.depth * TOKEN_BYTES
            child = node.children.get(tokens[at : at + page_bytes])
            if child is None:
                child = self._grow(node, tokens, stop, now)
                added += child.depth - child.start
            elif child.depth > stop or tokens[at : child.depth * TOKEN_BYTES] != child.edge:
                common = common_prefix(tokens[at : stop * TOKEN_BYTES], child.edge)
                child = self.split(child, child.start + common // self.page * self.page)
            node = child
        return node, added

    def _grow(self, parent: Node, tokens: bytes, stop: int, now: int) -> Node:
        if self._edge_limit is not None:
            stop = min(stop, parent.depth + self._edge_limit)
        edge = tokens[parent.depth * TOKEN_BYTES : stop * TOKEN_BYTES]
        self._serial += 1
        child = Node(edge, parent.depth, stop, parent, self._serial, now)
        parent.children[edge[: self.page * TOKEN_BYTES]] = child
        return child

    def split(self, node: Node, depth: int) -> Node:
        """Cut a node's edge at `depth`, strictly inside it; returns the new upper part.

        The lower part keeps its identity, its depth and its state; the upper part gets no state.
        """
        assert node.parent is not None and node.start < depth < node.depth, "a split lies strictly inside an edge"
        cut = (depth - node.start) * TOKEN_BYTES
        self._serial += 1
        upper = Node(node.edge[:cut], node.start, depth, node.parent, self._serial, node.created)
        upper.used, upper.uses, upper.locks = node.used, node.uses, node.locks
        node.parent.children[self._key(upper)] = upper
        node.edge, node.start, node.parent = node.edge[cut:], depth, upper
        upper.children[self._key(node)] = node
        return upper

    def remove(self, node: Node) -> Node:
        """Take a childless node out; returns its parent."""
        parent = node.parent
        assert parent is not None and not node.children, "only leaves leave"
        del parent.children[self._key(node)]
        node.parent = None
        return parent

    def _key(self, node: Node) -> bytes:
        return node.edge[: self.page * TOKEN_BYTES]

"""A forest of token prefixes: finds the longest stored prefix of a prompt.

An edge is used and evicted in one of two ways. With `block_size` alone, it is used and evicted as a whole (radix).
With `fixed_blocks`, its blocks are used and evicted one by one, as in a table of blocks by hash chain. An edge then
is a run of blocks that were stored and used together, so that a long prompt costs as much as a short one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Protocol

from spanlab.core.token_string import EMPTY, TokenString


class State:
    """A stored recurrent state: the state of all layers after the first `position` tokens of its node's path.

    In the tree of an independent span it is a map of states instead. `node` is None once it is removed from the
    store.
    """

    __slots__ = ("created", "in_heap", "locks", "node", "num_bytes", "position", "serial", "used", "uses")

    def __init__(self, position: int, node: Node, serial: int, now: int, num_bytes: int) -> None:
        self.position, self.serial, self.num_bytes = position, serial, num_bytes
        self.node: Node | None = node
        self.created = self.used = now
        self.locks = self.uses = 0
        self.in_heap = False


def position_of(state: State) -> int:
    """Return the sort key of a state."""
    return state.position


class Node:
    """Tokens `[start, depth)` of a prefix, and the recurrent states at positions in `(start, depth]`.

    `key`     its first block as bytes, its key among its parent's children
    `states`  by position, increasing
    `lost`    positions whose state was stored once and has been removed, increasing
    `locks`   users of this node and of everything below it, so a locked node's ancestors are locked too
    """

    __slots__ = (
        "children",
        "created",
        "depth",
        "edge",
        "in_heap",
        "key",
        "locks",
        "lost",
        "parent",
        "serial",
        "start",
        "states",
        "used",
        "uses",
    )

    def __init__(
        self, key: bytes, edge: TokenString, start: int, depth: int, parent: Node | None, serial: int, now: int
    ) -> None:
        self.key, self.edge, self.start, self.depth = key, edge, start, depth
        self.parent, self.serial = parent, serial
        self.children: dict[bytes, Node] = {}
        self.states: list[State] = []
        self.lost: list[int] = []
        self.created = self.used = now
        self.locks = self.uses = 0
        self.in_heap = False

    def path(self) -> Iterator[Node]:
        """This node and its ancestors below the root, deepest first."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def deepest_state(self, limit: int) -> State | None:
        """Return the deepest state of this path at a position up to `limit`; None where there is none."""
        node: Node | None = self
        while node is not None:
            if node.states:
                within = bisect_right(node.states, limit, key=position_of)
                if within:
                    return node.states[within - 1]
            node = node.parent
        return None

    def deepest_loss(self, above: int, limit: int) -> int:
        """Return the deepest position of this path in (above, limit] whose state was removed, else `above`."""
        node: Node | None = self
        while node is not None and node.depth > above:
            within = bisect_right(node.lost, limit)
            if within:
                return max(above, node.lost[within - 1])
            node = node.parent
        return above


def unlocked_tokens(paths: Sequence[tuple[Node, int]]) -> int:
    """Return the number of unlocked tokens on the paths of nodes, each up to a depth.

    Paths may overlap, as where a prompt contains one document twice; shared tokens count once.
    """
    if len(paths) == 1:
        return _unlocked_on(*paths[0])
    reach: dict[Node, int] = {}
    for end, depth in paths:
        for node in end.path():
            if node.locks == 0 and node.start < depth:
                reach[node] = max(reach.get(node, 0), min(node.depth, depth))
    return sum(stop - node.start for node, stop in reach.items())


def _unlocked_on(node: Node, depth: int) -> int:
    tokens = 0
    while node.parent is not None:
        if node.locks == 0 and node.start < depth:
            tokens += min(node.depth, depth) - node.start
        node = node.parent
    return tokens


class Watcher(Protocol):
    """An observer that keeps data for each node, such as device memory, and must follow changes of the tree."""

    def split(self, upper: Node, lower: Node) -> None:
        """Note that `upper` has just been split off the top of `lower`."""
        ...

    def removed(self, node: Node) -> None:
        """Note that `node` has been removed from the tree."""
        ...


class PrefixTree:
    """Finds and extends prefixes at block granularity, independently of bytes, budgets and eviction.

    It counts `num_tokens`, and `num_leaves`, the stored prefixes that no other one extends.

    `block_size`    tokens per block, the unit of matching: lengths returned are multiples of it.
    `fixed_blocks`  every block has its own age, so use and eviction go block by block too.
    """

    def __init__(self, block_size: int = 1, fixed_blocks: bool = False) -> None:
        self.block_size, self.fixed_blocks = block_size, fixed_blocks
        self._serial = 0
        self.num_tokens = self.num_leaves = 0
        self.watchers: list[Watcher] = []

    def new_root(self, name: bytes = b"") -> Node:
        """Return a new root with the key `name`; prefixes under different roots are never shared."""
        return Node(name, EMPTY, 0, 0, None, 0, 0)

    def match(self, start: Node, tokens: TokenString) -> tuple[Node, int]:
        """Return the deepest node that `tokens` reach from `start`, and the matched length in tokens.

        `tokens` contain those of `start`. The length is less than the node's depth when the match ends inside its edge.
        Changes nothing.
        """
        node, depth, block_size = start, start.depth, self.block_size
        while True:
            child = node.children.get(tokens.key(depth, block_size))
            if child is None:
                return node, depth
            common = tokens.common(depth, child.edge)
            if common < child.depth - depth:
                return child, depth + common // block_size * block_size
            node, depth = child, child.depth

    def extend(self, node: Node, tokens: TokenString, stop: int, now: int) -> Node:
        """Ensure that a node ends at `stop` below `node`, along `tokens`, and return it.

        `stop` is a multiple of the block size and lies within `tokens`.
        """
        while node.depth < stop:
            depth = node.depth
            child = node.children.get(key := tokens.key(depth, self.block_size))
            if child is None:
                child = self._add_child(node, key, tokens.cut(depth, stop), now)
            elif (common := min(tokens.common(depth, child.edge), stop - depth)) < child.depth - depth:
                lower, child = child, self.split(child, depth + common // self.block_size * self.block_size)
                if not self.fixed_blocks:
                    lower.used = child.used = now
            node = child
        return node

    def _add_child(self, parent: Node, key: bytes, edge: TokenString, now: int) -> Node:
        length = len(edge)
        self._serial += self._serials(length)
        child = Node(key, edge, parent.depth, parent.depth + length, parent, self._serial, now)
        if parent.children or parent.parent is None:
            self.num_leaves += 1
        self.num_tokens += length
        parent.children[key] = child
        return child

    def split(self, node: Node, depth: int) -> Node:
        """Split a node's edge at `depth`, strictly inside it; returns the new upper part.

        The lower part keeps its identity and its depth; states stay at their positions, in the part that contains
        them.
        """
        parent, edge, offset = node.parent, node.edge, depth - node.start
        assert parent is not None and node.start < depth < node.depth, "a split lies strictly inside an edge"
        serial = self._serial_above(node, depth)
        upper = Node(node.key, edge.cut(0, offset), node.start, depth, parent, serial, node.created)
        upper.used, upper.uses, upper.locks = node.used, node.uses, node.locks
        parent.children[upper.key] = upper
        node.key, node.edge, node.start, node.parent = (
            edge.key(offset, self.block_size),
            edge.cut(offset, len(edge)),
            depth,
            upper,
        )
        upper.children[node.key] = node
        _split_states(upper, node, depth)
        for watcher in self.watchers:
            watcher.split(upper, node)
        return upper

    def end_at(self, node: Node, depth: int) -> Node:
        """Return the node of a path that ends at `depth`, split off if needed; the path's end if it is higher."""
        while node.parent is not None and node.start >= depth:
            node = node.parent
        return self.split(node, depth) if node.depth > depth else node

    def unit_start(self, node: Node, position: int) -> int:
        """Return where the unit of eviction that contains a position begins: its block, or the whole edge."""
        return (position - 1) // self.block_size * self.block_size if self.fixed_blocks else node.start

    def _serials(self, tokens: int) -> int:
        """Return how many serial numbers a new edge takes: one per block with fixed blocks, else one."""
        return tokens // self.block_size if self.fixed_blocks else 1

    def _serial_above(self, node: Node, depth: int) -> int:
        """Return the serial number of an edge's part above `depth`; with fixed blocks, of its last block."""
        if self.fixed_blocks:
            return node.serial - self._serials(node.depth - depth)
        self._serial += 1
        return self._serial

    def remove(self, node: Node) -> Node:
        """Remove a childless node; returns its parent."""
        parent = node.parent
        assert parent is not None and not node.children, "only leaves are removed"
        del parent.children[node.key]
        node.parent = None
        if parent.children or parent.parent is None:
            self.num_leaves -= 1
        self.num_tokens -= node.depth - node.start
        for watcher in self.watchers:
            watcher.removed(node)
        return parent


def _split_states(upper: Node, lower: Node, depth: int) -> None:
    """Move the states and losses above `depth` to the upper part of a split edge."""
    if lower.states:
        above = bisect_right(lower.states, depth, key=position_of)
        upper.states, lower.states = lower.states[:above], lower.states[above:]
        for state in upper.states:
            state.node = upper
    if lower.lost:
        above = bisect_right(lower.lost, depth)
        upper.lost, lower.lost = lower.lost[:above], lower.lost[above:]

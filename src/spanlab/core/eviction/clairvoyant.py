"""Eviction orders that know the future: Belady's rule and its index of next uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from spanlab.core.eviction.orders import (
    EVICTION_ORDERS,
    FUTURE,
    EvictionFacts,
    EvictionOrder,
    Kind,
    RankedHeap,
    RankedT,
)
from spanlab.core.request import Request
from spanlab.core.token_string import TokenString
from spanlab.core.tree import CacheSpan, Key, Layout, Node, PrefixTree, State

# ------------------------------------------------------------------------------
# The future of a run: the prefixes of the requests to come, and the next request that uses
# each.
# ------------------------------------------------------------------------------

NEVER = 1 << 62
RootName = Callable[[Request, CacheSpan], bytes]


class FuturePosition(NamedTuple):
    """A position on a path of future requests: within `node`, `depth` tokens from the start of the path."""

    node: Node
    depth: int


class Future:
    """A tree of the prefixes of requests in order of arrival, split wherever two of them diverge.

    An admitted request is no longer in the future. Requests are assumed to be admitted in order of arrival.

    `num_admitted`  number of admitted requests
    """

    def __init__(self, requests: Sequence[Request], layout: Layout, root_name: RootName, block_size: int) -> None:
        self._tree, self._block_size, self.num_admitted = PrefixTree(block_size), block_size, 0
        self._roots: dict[bytes, Node] = {}
        self._admitted = [False] * len(requests)
        self._number = {request.id: index for index, request in enumerate(requests)}
        self._users: dict[Node, list[int]] = {}  # future requests by node, the next one last
        ends = []
        for index, request in enumerate(requests):
            for cache_span in layout(request):
                if cache_span.storable:
                    ends.append((index, self._store(root_name(request, cache_span), cache_span.tokens)))
        for index, end in reversed(ends):
            for node in end.path():
                self._users.setdefault(node, []).append(index)

    def _store(self, root: bytes, tokens: TokenString) -> Node:
        start = self._roots.setdefault(root, self._tree.new_root())
        return self._tree.extend(start, tokens, len(tokens) // self._block_size * self._block_size, 0)

    def admitted(self, request: Request) -> None:
        """Remove an admitted request from the future."""
        assert request.id in self._number, "a clairvoyant order needs all requests of its run"
        number = self._number[request.id]
        self.num_admitted += not self._admitted[number]
        self._admitted[number] = True

    def root(self, name: bytes) -> FuturePosition | None:
        """The start of the paths under a root; None where no request has this root."""
        node = self._roots.get(name)
        return None if node is None else FuturePosition(node, 0)

    def next_use(self, position: FuturePosition | None) -> int:
        """The index of the next request that uses the prefix up to a position; `NEVER` without one."""
        if position is None:
            return NEVER
        users = self._users.get(position.node, [])
        while users and self._admitted[users[-1]]:
            users.pop()
        return users[-1] if users else NEVER

    def ancestor_at(self, position: FuturePosition | None, depth: int) -> FuturePosition | None:
        """The position at a smaller depth of the same path."""
        if position is None:
            return None
        node = position.node
        while node.start >= depth:
            assert node.parent is not None, "the root starts at zero"
            node = node.parent
        return FuturePosition(node, depth)

    def branch_points(self, position: FuturePosition, edge: TokenString) -> list[FuturePosition]:
        """Positions along an edge where future requests diverge, then the deepest match; empty where none matches."""
        points, (node, depth), start = list[FuturePosition](), position, position.depth
        while depth - start < len(edge):
            if depth == node.depth:
                child = node.children.get(edge.key(depth - start, self._block_size))
                if child is None:
                    break
                node = child
            remainder = node.edge.cut(depth - node.start, len(node.edge))
            common = edge.common(depth - start, remainder) // self._block_size * self._block_size
            if not common:
                break
            depth += common
            points.append(FuturePosition(node, depth))
            if depth < node.depth:
                break
        return points


# ------------------------------------------------------------------------------
# Belady's clairvoyant order: evict first the entry whose next use is farthest, or that is never
# used again.
#
# Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
# Journal 5 (1966). With entries of one size that are all stored it is optimal. It also stores
# entries that are used once, so the offline bound may be higher.
# ------------------------------------------------------------------------------


@EVICTION_ORDERS.register("belady", needs=(FUTURE,))
def belady(facts: EvictionFacts) -> EvictionOrder:
    """The entry with the farthest next use in order of arrival; among states for one request, the shallowest."""
    paths = future_paths(facts, "belady")
    leaves = Belady(facts.leaves, paths.rank_of_node, paths.follow)
    return EvictionOrder(facts.watched(leaves), Belady(facts.states, paths.rank_of_state))


@EVICTION_ORDERS.register("belady_size", needs=(FUTURE,))
def belady_size(facts: EvictionFacts) -> EvictionOrder:
    """The entry with the most bytes × requests until its next use, in order of arrival.

    Belady-Size in Berger et al., "Practical Bounds on Optimal Caching with Variable Object Sizes", POMACS 2 (2018): a
    heuristic for entries of several sizes, where the best choice is NP-hard. Where the saving of an entry grows with
    its bytes, as for the KV of tokens, `belady` loses less.
    """
    paths = future_paths(facts, "belady_size")

    def by_size(kind: Kind[RankedT], rank: Callable[[RankedT], Key]) -> Callable[[RankedT], Key]:
        """The rank (negative next use, depth, serial), its first element replaced by -(bytes × requests until that)."""

        def sized_rank(entry: RankedT) -> Key:
            negative_use, *ties = rank(entry)
            return (paths.future.num_admitted + negative_use) * kind.num_bytes(entry), *ties

        return sized_rank

    leaves = Belady(facts.leaves, by_size(facts.leaves, paths.rank_of_node), paths.follow)
    states = Belady(facts.states, by_size(facts.states, paths.rank_of_state))
    return EvictionOrder(facts.watched(leaves), states, by_block=True)


class FuturePaths:
    """Positions of a tree's nodes in the tree of future prefixes; a watcher of the store's tree."""

    def __init__(self, tree: PrefixTree, future: Future) -> None:
        self._tree, self.future = tree, future
        self._positions: dict[Node, FuturePosition | None] = {}

    def rank_of_node(self, node: Node) -> Key:
        """Rank of a node: the farther its next use, the lower."""
        return -self.future.next_use(self._positions[node]), node.depth, node.serial

    def rank_of_state(self, state: State) -> Key:
        """Rank of a state, by the next use of its prefix."""
        assert state.node is not None, "a state is ranked while it is stored"
        position = self.future.ancestor_at(self._positions[state.node], state.position)
        return -self.future.next_use(position), state.position, state.serial

    def follow(self, node: Node) -> None:
        """Find the future position of a new node; split it where future requests diverge, for one rank per node."""
        assert node.parent is not None, "a new node is in the tree"
        parent = node.parent
        start = self.future.root(parent.key) if parent.parent is None else self._positions[parent]
        ends = [] if start is None or start.depth < parent.depth else self.future.branch_points(start, node.edge)
        self._positions[node] = ends[-1] if ends and ends[-1].depth == node.depth else None
        for end in ends:
            if end.depth < node.depth:
                self._positions[self._tree.split(node, end.depth)] = end

    def split(self, upper: Node, lower: Node) -> None:
        """Give the upper node its position on the path of the lower one."""
        self._positions[upper] = self.future.ancestor_at(self._positions[lower], upper.depth)

    def removed(self, node: Node) -> None:
        """Forget a node."""
        del self._positions[node]


def future_paths(facts: EvictionFacts, order: str) -> FuturePaths:
    """Return the future paths of a store's tree; ValueError where the future requests are not known."""
    if facts.rules.future is None:
        raise ValueError(f"eviction={order}: expected a simulated run, whose requests are known beforehand")
    paths = FuturePaths(facts.tree, facts.rules.future)
    facts.tree.watchers.append(paths)
    return paths


def _follow_nothing(item: object) -> None:
    """Do nothing: the position of a state follows from its node."""


class Belady(RankedHeap[RankedT]):
    """Entries by a rank that falls when a request is admitted, so that it is computed again at every use.

    `follow`  is called with each new entry before it is ranked
    """

    def __init__(
        self, kind: Kind[RankedT], rank: Callable[[RankedT], Key], follow: Callable[[RankedT], None] = _follow_nothing
    ) -> None:
        super().__init__(kind, rank)
        self._follow = follow

    def add(self, items: Sequence[RankedT]) -> None:
        for item in items:
            self._follow(item)
            self.offer(item)

    def used(self, items: Iterable[RankedT]) -> None:
        for item in items:
            self.offer(item)

    def renewed(self, items: Iterable[RankedT]) -> None:
        self.used(items)

    def split(self, upper: RankedT, lower: RankedT) -> None:
        """Do nothing: the upper node is offered when the lower one is removed."""

    def removed(self, item: RankedT) -> None:
        """Do nothing: a removed entry is dropped when it reaches the top of the heap."""

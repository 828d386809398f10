"""Eviction orders that know the future: Belady's rule and its index of next uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from spanlab.core.eviction.orders import (
    EVICTION_ORDERS,
    FUTURE,
    EvictionFacts,
    EvictionOrder,
    Future,
    FuturePosition,
    Kind,
    RankedHeap,
    RankedT,
)
from spanlab.core.tree import Key, Node, PrefixTree, State

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
    """The entry with the farthest next use in order of arrival; among states for one request, the
    shallowest."""
    paths = future_paths(facts, "belady")
    leaves = Belady(facts.leaves, paths.rank_of_node, paths.follow)
    return EvictionOrder(facts.watched(leaves), Belady(facts.states, paths.rank_of_state))


@EVICTION_ORDERS.register("belady_size", needs=(FUTURE,))
def belady_size(facts: EvictionFacts) -> EvictionOrder:
    """The entry with the most bytes × requests until its next use, in order of arrival.

    Belady-Size in Berger et al., "Practical Bounds on Optimal Caching with Variable Object Sizes",
    POMACS 2 (2018): a heuristic for entries of several sizes, where the best choice is NP-hard.
    Where the saving of an entry grows with its bytes, as for the KV of tokens, `belady` loses less.
    """
    paths = future_paths(facts, "belady_size")

    def by_size(kind: Kind[RankedT], rank: Callable[[RankedT], Key]) -> Callable[[RankedT], Key]:
        """The rank (negative next use, depth, serial), its first element replaced by -(bytes ×
        requests until that)."""

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
        """Find the future position of a new node; split it where future requests diverge, for one
        rank per node."""
        assert node.parent is not None, "a new node is in the tree"
        parent = node.parent
        start = (
            self.future.root(parent.root_name) if parent.parent is None else self._positions[parent]
        )
        ends = (
            []
            if start is None or start.depth < parent.depth
            else self.future.branch_points(start, node.edge)
        )
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
    """Return the future paths of a store's tree; ValueError where the future requests are not
    known."""
    if facts.rules.future is None:
        raise ValueError(
            f"eviction={order}: expected a simulated run, whose requests are known beforehand"
        )
    paths = FuturePaths(facts.tree, facts.rules.future)
    facts.tree.watchers.append(paths)
    return paths


class Belady(RankedHeap[RankedT]):
    """Entries by a rank that falls when a request is admitted, so that it is computed again at
    every use.

    `follow`  is called with each new entry before it is ranked; the position of a state follows
              from its node
    """

    def __init__(
        self,
        kind: Kind[RankedT],
        rank: Callable[[RankedT], Key],
        follow: Callable[[RankedT], None] = lambda item: None,
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

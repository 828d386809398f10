"""A clairvoyant: what is used last, or never again, leaves first.

Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5 (1966). With entries
of one size that are all stored it is optimal. It stores what is used once too, so the offline bound may be higher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from spanlab.core.eviction.contract import EVICTION_ORDERS, FUTURE, EvictionFacts, EvictionOrder, Kind
from spanlab.core.eviction.future import Future, Place
from spanlab.core.eviction.lists import T
from spanlab.core.eviction.ranked_heap import RankedHeap
from spanlab.core.eviction_queue import Key
from spanlab.core.tree import Node, PrefixTree, State


@EVICTION_ORDERS.register("belady", needs=(FUTURE,))
def belady(facts: EvictionFacts) -> EvictionOrder:
    """The entry with the farthest next use in order of arrival; among states for one request, the shallowest."""
    paths = future_paths(facts, "belady")
    leaves = Belady(facts.leaves, paths.rank_of_node, paths.follow)
    return EvictionOrder(facts.watched(leaves), Belady(facts.states, paths.rank_of_state))


class FuturePaths:
    """Where nodes of a tree stand among the prefixes to come; a watcher of the tree."""

    def __init__(self, tree: PrefixTree, future: Future) -> None:
        self._tree, self.future = tree, future
        self._places: dict[Node, Place | None] = {}

    def rank_of_node(self, node: Node) -> Key:
        """Low where the next use is far."""
        return -self.future.next_use(self._places[node]), node.depth, node.serial

    def rank_of_state(self, state: State) -> Key:
        """The same by the tokens that a state has read."""
        assert state.node is not None, "a state is ranked while it is stored"
        place = self.future.above(self._places[state.node], state.position)
        return -self.future.next_use(place), state.position, state.serial

    def follow(self, node: Node) -> None:
        """Find the place of a new node, which is cut where requests to come part, so that each part has one rank."""
        assert node.parent is not None, "a new node is in the tree"
        above = node.parent
        place = self.future.root(above.key) if above.parent is None else self._places[above]
        found = [] if place is None or place.depth < above.depth else self.future.below(place, node.edge)
        self._places[node] = found[-1] if found and found[-1].depth == node.depth else None
        for place in found:
            if place.depth < node.depth:
                self._places[self._tree.split(node, place.depth)] = place

    def split(self, upper: Node, lower: Node) -> None:
        """The upper part is on the way to the lower one."""
        self._places[upper] = self.future.above(self._places[lower], upper.depth)

    def removed(self, node: Node) -> None:
        """Forget a node."""
        del self._places[node]


def future_paths(facts: EvictionFacts, order: str) -> FuturePaths:
    """Where nodes of a store's tree stand; ValueError where what will be asked for is not known."""
    if facts.rules.future is None:
        raise ValueError(f"eviction={order}: expected a simulated run, whose requests are known beforehand")
    paths = FuturePaths(facts.tree, facts.rules.future)
    facts.tree.watchers.append(paths)
    return paths


def _in_place(item: object) -> None:
    """States stand where their nodes do."""


class Belady(RankedHeap[T]):
    """Entries by a rank that falls when a request is admitted, so that it is taken again at every use.

    `follow`  is called with each new entry before it is ranked
    """

    def __init__(self, kind: Kind[T], rank: Callable[[T], Key], follow: Callable[[T], None] = _in_place) -> None:
        super().__init__(kind, rank)
        self._follow = follow

    def add(self, items: Sequence[T]) -> None:
        for item in items:
            self._follow(item)
            self.offer(item)

    def used(self, items: Iterable[T]) -> None:
        for item in items:
            self.offer(item)

    def renewed(self, items: Iterable[T]) -> None:
        self.used(items)

    def split(self, upper: T, lower: T) -> None:
        """The upper part is offered when the lower one has left."""

    def removed(self, item: T) -> None:
        """What has gone is dropped when it surfaces."""

"""Common parts of orders over lists, and the adaptation of list algorithms to a tree of prefixes.

The published algorithms have entries of equal size, each of which can be evicted at any time. Here

- every node of the tree, inner nodes included, is an entry of the list of leaves; sizes are bytes;
- a request uses all nodes of its matched path, the deepest one first;
- an entry that is locked or has child nodes is skipped and keeps its position in the list;
- when an edge is split, the upper node follows the lower one in the list and copies its marks;
- a prompt that is stored behind a node refreshes the age of the path, which does not count as a use.

With entries of one block and no common prefixes this is the published algorithm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Generic

from spanlab.core.eviction.contract import EvictionFacts, EvictionOrder, Kind, RankedT, WatchingCandidates
from spanlab.core.eviction_queue import Key


def both(
    facts: EvictionFacts, make: Callable[[Kind[Any]], WatchingCandidates[Any]], by_block: bool = False
) -> EvictionOrder:
    """Return an order that applies one algorithm to leaves and, separately, to states."""
    return EvictionOrder(facts.watched(make(facts.leaves)), make(facts.states), by_block=by_block)


class ListOrder(ABC, Generic[RankedT]):
    """Defaults of `Candidates` for a list algorithm.

    Where the store may evict a leaf or a state, it evicts the least recently used of the two victims.
    """

    def __init__(self, kind: Kind[RankedT]) -> None:
        self.kind = kind

    def renewed(self, items: Iterable[RankedT]) -> None:
        """Do nothing: the default is an order of arrival."""

    def offer(self, item: RankedT) -> None:
        """Do nothing: `victim` checks which entries can be evicted."""

    def lowest(self) -> tuple[Key, RankedT] | None:
        """The victim, ranked by its last use."""
        item = self.victim()
        return None if item is None else ((item.used, item.serial), item)

    @abstractmethod
    def victim(self) -> RankedT | None:
        """Return the next entry to evict; repeated calls before its removal return the same one."""

"""What orders over lists have in common, and how a list algorithm is carried over to a tree of prefixes.

The published algorithms hold entries of equal size, each of which may leave at any time. Here

- every node of the tree is an entry of the list of leaves, those with nodes below them as well; sizes are bytes;
- a request uses all nodes of the path that it has found, the deepest one first;
- an entry that may not leave, for it is locked or has nodes below it, is passed over and keeps its place;
- of an edge that is cut, the upper part stands right behind the lower one, with its marks;
- a prompt that is stored behind a node renews the age of the path, which is no use.

With entries of one block and no common beginnings this is the published algorithm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

from spanlab.core.eviction.contract import Candidates, EvictionFacts, EvictionOrder, Kind, Watching
from spanlab.core.eviction_queue import Key, Ranked

T = TypeVar("T", bound=Ranked)


class Order(Candidates[T], Protocol):
    """Candidates of either kind."""

    def split(self, upper: T, lower: T) -> None: ...


def both(facts: EvictionFacts, make: Callable[[Kind[Any]], Order[Any]]) -> EvictionOrder:
    """The same algorithm twice: for leaves, and for states."""
    leaves: Watching = make(facts.leaves)
    return EvictionOrder(facts.watched(leaves), make(facts.states))


class ListOrder(ABC, Generic[T]):
    """The parts of `Candidates` that an algorithm need not fill in.

    Where either a leaf or a state would do, the one used longest ago leaves.
    """

    def __init__(self, kind: Kind[T]) -> None:
        self.kind = kind

    def renewed(self, items: Iterable[T]) -> None:
        """Nothing changes where the order is one of arrival."""

    def offer(self, item: T) -> None:
        """Entries that may leave are told apart when a victim is looked for."""

    def lowest(self) -> tuple[Key, T] | None:
        """The victim, ranked by its last use."""
        item = self.victim()
        return None if item is None else ((item.used, item.serial), item)

    @abstractmethod
    def victim(self) -> T | None:
        """The entry that leaves next; asked again before it has left, the same one."""

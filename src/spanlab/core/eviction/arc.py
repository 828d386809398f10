"""ARC: recency against frequency, by which of both has lately evicted what was asked for again.

Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spanlab.core.eviction.chain import Chain
from spanlab.core.eviction.contract import EVICTION_ORDERS, EvictionFacts, EvictionOrder, Kind
from spanlab.core.eviction.ghosts import GhostList, Names
from spanlab.core.eviction.lists import ListOrder, T, both


@EVICTION_ORDERS.register("arc")
def arc(facts: EvictionFacts) -> EvictionOrder:
    """The longest unused entry of those used once, or of those used again, by a target that adapts itself."""
    return both(facts, Arc)


class Arc(ListOrder[T]):
    """Entries used once and again (T1, T2), and names of what each of both has evicted (B1, B2).

    Room is made before it is known what will be stored. So the target of T1 moves after the eviction that a miss
    causes, and the published choice between T1 and T2 at equality, which depends on the missed entry, falls to T2.
    """

    def __init__(self, kind: Kind[T]) -> None:
        super().__init__(kind)
        self._once, self._again = Chain(kind.num_bytes), Chain(kind.num_bytes)
        self._once_gone, self._again_gone = GhostList(), GhostList()
        self._names = Names(kind.name)
        self._target = 0.0  # bytes of T1

    def add(self, items: Sequence[T]) -> None:
        for item in items:
            name = self._names.add(item)
            known = name in self._once_gone or name in self._again_gone
            self._adapt(name, self.kind.num_bytes(item))
            (self._again if known else self._once).append(item)
        self._forget()

    def used(self, items: Iterable[T]) -> None:
        for item in items:
            self._list(item).remove(item)
            self._again.append(item)

    def renewed(self, items: Iterable[T]) -> None:
        for item in items:
            self._list(item).renew(item)

    def split(self, upper: T, lower: T) -> None:
        self._list(lower).split(upper, lower)
        self._names.split(upper, lower)

    def removed(self, item: T) -> None:
        entries = self._list(item)
        entries.remove(item)
        gone = self._once_gone if entries is self._once else self._again_gone
        gone.append(self._names.pop(item), self.kind.num_bytes(item))
        self._forget()

    def victim(self) -> T | None:
        lists = self._once, self._again
        first, second = lists if self._once.bytes > self._target else reversed(lists)
        return first.first(self.kind.may_leave) or second.first(self.kind.may_leave)

    def _list(self, item: T) -> Chain[T]:
        return self._once if item in self._once else self._again

    def _adapt(self, name: bytes, num_bytes: int) -> None:
        """Move the target towards the list that should not have evicted an entry."""
        once, again = self._once_gone, self._again_gone
        if name in once:
            more = num_bytes * max(1.0, again.bytes / once.bytes)
            self._target = min(float(self.kind.capacity), self._target + more)
        elif name in again:
            self._target = max(0.0, self._target - num_bytes * max(1.0, once.bytes / again.bytes))
        once.discard(name)
        again.discard(name)

    def _forget(self) -> None:
        """No more than one capacity of T1 and B1, and two of all four."""
        capacity = self.kind.capacity
        self._once_gone.shrink(max(0, capacity - self._once.bytes))
        others = self._once.bytes + self._again.bytes + self._once_gone.bytes
        self._again_gone.shrink(max(0, 2 * capacity - others))

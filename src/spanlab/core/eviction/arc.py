"""ARC: a balance of recency and frequency, adapted to the evicted entries that are stored again.

Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spanlab.core.eviction.chain import Chain
from spanlab.core.eviction.contract import EVICTION_ORDERS, EvictionFacts, EvictionOrder, Kind, RankedT
from spanlab.core.eviction.ghosts import GhostList, Names
from spanlab.core.eviction.lists import ListOrder, both


@EVICTION_ORDERS.register("arc")
def arc(facts: EvictionFacts) -> EvictionOrder:
    """The least recently used entry, of those used once or of those used again, by an adaptive target."""
    return both(facts, Arc, by_block=True)


class Arc(ListOrder[RankedT]):
    """Lists of entries used once and used again (T1, T2), and of the names evicted from each (B1, B2).

    The store evicts before the order receives the new entry. So the target of T1 changes after the eviction that a
    miss causes. The published choice between T1 and T2 at equality, which depends on the missed entry, is always T2.
    """

    def __init__(self, kind: Kind[RankedT]) -> None:
        super().__init__(kind)
        self._once, self._again = Chain(kind.num_bytes), Chain(kind.num_bytes)
        self._once_ghosts, self._again_ghosts = GhostList(), GhostList()
        self._names = Names(kind.name)
        self._target = 0.0  # bytes of T1

    def add(self, items: Sequence[RankedT]) -> None:
        for item in items:
            name = self._names.add(item)
            was_evicted = name in self._once_ghosts or name in self._again_ghosts
            self._adapt(name, self.kind.num_bytes(item))
            (self._again if was_evicted else self._once).append(item)
        self._trim_ghosts()

    def used(self, items: Iterable[RankedT]) -> None:
        for item in items:
            self._list(item).remove(item)
            self._again.append(item)

    def renewed(self, items: Iterable[RankedT]) -> None:
        for item in items:
            self._list(item).renew(item)

    def split(self, upper: RankedT, lower: RankedT) -> None:
        self._list(lower).split(upper, lower)
        self._names.split(upper, lower)

    def removed(self, item: RankedT) -> None:
        entries = self._list(item)
        entries.remove(item)
        ghosts = self._once_ghosts if entries is self._once else self._again_ghosts
        ghosts.append(self._names.pop(item), self.kind.num_bytes(item))
        self._trim_ghosts()

    def victim(self) -> RankedT | None:
        lists = self._once, self._again
        first, second = lists if self._once.bytes > self._target else reversed(lists)
        return first.first(self.kind.may_leave) or second.first(self.kind.may_leave)

    def _list(self, item: RankedT) -> Chain[RankedT]:
        return self._once if item in self._once else self._again

    def _adapt(self, name: bytes, num_bytes: int) -> None:
        """Change the target in favour of the list that evicted this entry."""
        once, again = self._once_ghosts, self._again_ghosts
        if name in once:
            increase = num_bytes * max(1.0, again.bytes / once.bytes)
            self._target = min(float(self.kind.capacity), self._target + increase)
        elif name in again:
            self._target = max(0.0, self._target - num_bytes * max(1.0, once.bytes / again.bytes))
        once.discard(name)
        again.discard(name)

    def _trim_ghosts(self) -> None:
        """Limit T1 and B1 together to one capacity, and all four lists to two."""
        capacity = self.kind.capacity
        self._once_ghosts.shrink(max(0, capacity - self._once.bytes))
        used_bytes = self._once.bytes + self._again.bytes + self._once_ghosts.bytes
        self._again_ghosts.shrink(max(0, 2 * capacity - used_bytes))

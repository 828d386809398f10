"""SIEVE: first in, first out, where a used entry survives once and keeps its position.

Zhang et al., "SIEVE is simpler than LRU", NSDI 2024.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spanlab.core.eviction.chain import Chain
from spanlab.core.eviction.contract import EVICTION_ORDERS, EvictionFacts, EvictionOrder, Kind, RankedT
from spanlab.core.eviction.lists import ListOrder, both


@EVICTION_ORDERS.register("sieve")
def sieve(facts: EvictionFacts) -> EvictionOrder:
    """The next entry after the hand that was not used since the hand last passed it."""
    return both(facts, Sieve)


class Sieve(ListOrder[RankedT]):
    """One queue and a hand, which moves from the oldest entry to the newest and then restarts.

    The hand clears the mark of each entry that it passes, except of entries that cannot be evicted.
    """

    def __init__(self, kind: Kind[RankedT]) -> None:
        super().__init__(kind)
        self._queue = Chain(kind.num_bytes)
        self._marked: set[RankedT] = set()
        self._hand: RankedT | None = None

    def add(self, items: Sequence[RankedT]) -> None:
        for item in items:
            self._queue.append(item)

    def used(self, items: Iterable[RankedT]) -> None:
        self._marked.update(items)

    def split(self, upper: RankedT, lower: RankedT) -> None:
        self._queue.split(upper, lower)
        if lower in self._marked:
            self._marked.add(upper)

    def removed(self, item: RankedT) -> None:
        if item is self._hand:
            self._hand = self._queue.newer(item)
        self._queue.remove(item)
        self._marked.discard(item)

    def victim(self) -> RankedT | None:
        starts = 0
        while starts < 3:  # the rest of this pass, one full pass that clears marks, and one over unmarked entries
            if self._hand is None:
                self._hand, starts = self._queue.newer(None), starts + 1
            item = self._hand
            if item is not None and self.kind.may_leave(item):
                if item not in self._marked:
                    return item
                self._marked.discard(item)
            if item is not None:
                self._hand = self._queue.newer(item)
        return None

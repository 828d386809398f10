"""SIEVE: first in, first out, where a use is a second chance, and survivors keep their place.

Zhang et al., "SIEVE is simpler than LRU", NSDI 2024.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spanlab.core.eviction.chain import Chain
from spanlab.core.eviction.contract import EVICTION_ORDERS, EvictionFacts, EvictionOrder, Kind
from spanlab.core.eviction.lists import ListOrder, T, both


@EVICTION_ORDERS.register("sieve")
def sieve(facts: EvictionFacts) -> EvictionOrder:
    """The next entry behind the hand that was not used since the hand last passed."""
    return both(facts, Sieve)


class Sieve(ListOrder[T]):
    """One queue and a hand, which moves from the oldest entry to the newest and then starts again.

    The hand takes the mark off entries that it passes, but for those that may not leave.
    """

    def __init__(self, kind: Kind[T]) -> None:
        super().__init__(kind)
        self._queue = Chain(kind.num_bytes)
        self._marked: set[T] = set()
        self._hand: T | None = None

    def add(self, items: Sequence[T]) -> None:
        for item in items:
            self._queue.append(item)

    def used(self, items: Iterable[T]) -> None:
        self._marked.update(items)

    def split(self, upper: T, lower: T) -> None:
        self._queue.split(upper, lower)
        if lower in self._marked:
            self._marked.add(upper)

    def removed(self, item: T) -> None:
        if item is self._hand:
            self._hand = self._queue.newer(item)
        self._queue.remove(item)
        self._marked.discard(item)

    def victim(self) -> T | None:
        starts = 0
        while starts < 3:  # once behind the hand, once over all of them, and once more over those without a mark
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

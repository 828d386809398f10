"""Segmented LRU: entries used once cannot displace entries used twice.

Karedla, Love and Wherry, "Caching strategies to improve disk system performance", Computer 27(3), 1994.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spanlab.checks import share
from spanlab.core.eviction.chain import Chain
from spanlab.core.eviction.contract import EVICTION_ORDERS, EvictionFacts, EvictionOrder, Kind, RankedT
from spanlab.core.eviction.lists import ListOrder, both


@EVICTION_ORDERS.register("slru")
def slru(facts: EvictionFacts, protected: float = 0.8) -> EvictionOrder:
    """The least recently used entry of the probationary segment, then of the protected one."""
    share("eviction_options.protected", protected)
    return both(facts, lambda kind: SegmentedLru(kind, protected))


class SegmentedLru(ListOrder[RankedT]):
    """Two segments; a used entry moves to the protected one, whose overflow returns to probation.

    `protected`  share of the store's bytes for the protected segment
    """

    def __init__(self, kind: Kind[RankedT], protected: float) -> None:
        super().__init__(kind)
        self._probation, self._protected = Chain(kind.num_bytes), Chain(kind.num_bytes)
        self._max_protected = int(protected * kind.capacity)

    def add(self, items: Sequence[RankedT]) -> None:
        for item in items:
            self._probation.append(item)

    def used(self, items: Iterable[RankedT]) -> None:
        for item in items:
            self._segment(item).remove(item)
            self._protected.append(item)
        while self._protected.bytes > self._max_protected:
            oldest = next(iter(self._protected))
            self._protected.remove(oldest)
            self._probation.append(oldest)

    def renewed(self, items: Iterable[RankedT]) -> None:
        for item in items:
            self._segment(item).renew(item)

    def split(self, upper: RankedT, lower: RankedT) -> None:
        self._segment(lower).split(upper, lower)

    def removed(self, item: RankedT) -> None:
        self._segment(item).remove(item)

    def victim(self) -> RankedT | None:
        return self._probation.first(self.kind.may_leave) or self._protected.first(self.kind.may_leave)

    def _segment(self, item: RankedT) -> Chain[RankedT]:
        return self._protected if item in self._protected else self._probation

"""GreedyDual-Size-Frequency: the work that an entry saves per byte, with a clock that ages old uses.

Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy", HP Labs HPL-98-69, 1998.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic

from spanlab.core.cost import COST
from spanlab.core.eviction.contract import EVICTION_ORDERS, EvictionFacts, EvictionOrder, Kind, RankedT
from spanlab.core.eviction_queue import EvictionQueue, Key


@EVICTION_ORDERS.register("gdsf", needs=(COST,))
def gdsf(facts: EvictionFacts) -> EvictionOrder:
    """The entry with the lowest clock + uses · cost / bytes, with the cost of recomputing the entry."""
    clock = Clock()
    leaves, states = Gdsf(facts.leaves, clock), Gdsf(facts.states, clock)
    return EvictionOrder(facts.watched(leaves), states)


class Clock:
    """The highest value of an evicted entry; leaves and states share it."""

    def __init__(self) -> None:
        self.value = 0.0


class Gdsf(Generic[RankedT]):
    """Values of entries, set at each use, which never decrease; a newly stored entry counts one use."""

    def __init__(self, kind: Kind[RankedT], clock: Clock) -> None:
        self._kind, self._clock = kind, clock
        self._queue = EvictionQueue(self._rank, kind.may_leave)
        self._value: dict[RankedT, float] = {}

    def add(self, items: Sequence[RankedT]) -> None:
        for item in items:
            self._value[item] = self._value_now(item)
        self._queue.add(items)

    def used(self, items: Iterable[RankedT]) -> None:
        for item in items:
            self._value[item] = max(self._value[item], self._value_now(item))

    def renewed(self, items: Iterable[RankedT]) -> None:
        """Do nothing: only uses change a value."""

    def offer(self, item: RankedT) -> None:
        self._queue.offer(item)

    def split(self, upper: RankedT, lower: RankedT) -> None:
        self._value[upper] = self._value[lower]

    def removed(self, item: RankedT) -> None:
        self._clock.value = max(self._clock.value, self._value.pop(item))

    def lowest(self) -> tuple[Key, RankedT] | None:
        return self._queue.lowest()

    def _value_now(self, item: RankedT) -> float:
        saved = self._kind.work(item) / max(1, self._kind.num_bytes(item))
        return self._clock.value + (item.uses + 1) * saved

    def _rank(self, item: RankedT) -> Key:
        return self._value.get(item, 0.0), item.serial

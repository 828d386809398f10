"""A leaf drawn at random, so that no fixed order of requests is the worst case.

Randomised leaf eviction of arXiv 2601.18999, where its competitive ratio is proven. Of several draws the least recently
used entry is evicted: an LRU without a list, by the power of two choices (Mitzenmacher, IEEE TPDS 12(10), 2001).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import numpy as np

from spanlab.checks import positive
from spanlab.core.eviction.contract import EVICTION_ORDERS, EvictionFacts, EvictionOrder, Kind, RankedT
from spanlab.core.eviction.lists import ListOrder, both


@EVICTION_ORDERS.register("random")
def random(facts: EvictionFacts, seed: int = 0, choices: int = 1) -> EvictionOrder:
    """The least recently used of `choices` draws among the candidates."""
    positive("eviction_options.choices", choices)
    generators = iter(np.random.default_rng(seed).spawn(2))
    return both(facts, lambda kind: RandomLeaf(kind, next(generators), choices))


class RandomLeaf(ListOrder[RankedT]):
    """Entries in arbitrary order; draws are repeated until an entry can be evicted.

    A leaf whose end was evicted stays the victim, so that the number of evictions for some bytes does not matter.
    """

    def __init__(self, kind: Kind[RankedT], rng: np.random.Generator, choices: int = 1) -> None:
        super().__init__(kind)
        self._rng, self._choices = rng, choices
        self._items: list[RankedT] = []
        self._slot: dict[RankedT, int] = {}  # index in `_items`
        self._drawn: RankedT | None = None
        self._rest: RankedT | None = None  # of the drawn leaf, whose end is about to be evicted

    def add(self, items: Sequence[RankedT]) -> None:
        for item in items:
            self._slot[item] = len(self._items)
            self._items.append(item)

    def used(self, items: Iterable[RankedT]) -> None:
        """Do nothing: the draw reads the last use from the entry."""

    def split(self, upper: RankedT, lower: RankedT) -> None:
        self.add([upper])
        if lower is self._drawn:
            self._rest = upper

    def removed(self, item: RankedT) -> None:
        if item is self._drawn:
            self._drawn = self._rest
        slot, last = self._slot.pop(item), self._items.pop()
        if last is not item:
            self._items[slot], self._slot[last] = last, slot

    def victim(self) -> RankedT | None:
        self._rest = None
        if self._drawn is None or not self._may_leave(self._drawn):
            drawn = [item for _ in range(self._choices) if (item := self._draw()) is not None]
            self._drawn = min(drawn, key=attrgetter("used", "serial"), default=None)
        return self._drawn

    def _draw(self) -> RankedT | None:
        """Draw a candidate; after 16 draws without one, draw from the list of all candidates."""
        for _ in range(16):
            if self._items and self._may_leave(item := self._items[self._rng.integers(len(self._items))]):
                return item
        free = [item for item in self._items if self._may_leave(item)]
        return free[self._rng.integers(len(free))] if free else None

    def _may_leave(self, item: RankedT) -> bool:
        return item in self._slot and self.kind.may_leave(item)

"""A leaf drawn at random: no order of requests can be the worst one for it.

Randomised leaf eviction of arXiv 2601.18999, where its competitive ratio is proven. Of several draws the entry that was
used longest ago leaves: an LRU without a list, by the power of two choices (Mitzenmacher, IEEE TPDS 12(10), 2001).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import numpy as np

from spanlab.checks import positive
from spanlab.core.eviction.contract import EVICTION_ORDERS, EvictionFacts, EvictionOrder, Kind
from spanlab.core.eviction.lists import ListOrder, T, both


@EVICTION_ORDERS.register("random")
def random(facts: EvictionFacts, seed: int = 0, choices: int = 1) -> EvictionOrder:
    """Of `choices` draws among the entries that may leave, the one that was used longest ago."""
    positive("eviction_options.choices", choices)
    generators = iter(np.random.default_rng(seed).spawn(2))
    return both(facts, lambda kind: RandomLeaf(kind, next(generators), choices))


class RandomLeaf(ListOrder[T]):
    """Entries in any order, among which one is drawn until one is drawn that may leave."""

    def __init__(self, kind: Kind[T], rng: np.random.Generator, choices: int = 1) -> None:
        super().__init__(kind)
        self._rng, self._choices = rng, choices
        self._items: list[T] = []
        self._at: dict[T, int] = {}
        self._drawn: T | None = None

    def add(self, items: Sequence[T]) -> None:
        for item in items:
            self._at[item] = len(self._items)
            self._items.append(item)

    def used(self, items: Iterable[T]) -> None:
        """Uses do not matter."""

    def split(self, upper: T, lower: T) -> None:
        self.add([upper])

    def removed(self, item: T) -> None:
        at, last = self._at.pop(item), self._items.pop()
        if last is not item:
            self._items[at], self._at[last] = last, at

    def victim(self) -> T | None:
        if self._drawn is None or not self._may_leave(self._drawn):
            drawn = [item for _ in range(self._choices) if (item := self._draw()) is not None]
            self._drawn = min(drawn, key=attrgetter("used", "serial"), default=None)
        return self._drawn

    def _draw(self) -> T | None:
        """A draw; where most entries may not leave, of a list of those that may."""
        for _ in range(16):
            if self._items and self._may_leave(item := self._items[self._rng.integers(len(self._items))]):
                return item
        free = [item for item in self._items if self._may_leave(item)]
        return free[self._rng.integers(len(free))] if free else None

    def _may_leave(self, item: T) -> bool:
        return item in self._at and self.kind.may_leave(item)

"""A leaf drawn at random: no order of requests can be the worst one for it.

Randomised leaf eviction of arXiv 2601.18999, where its competitive ratio is proven.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from spanlab.core.eviction.contract import EVICTION_ORDERS, EvictionFacts, EvictionOrder, Kind
from spanlab.core.eviction.lists import ListOrder, T, both


@EVICTION_ORDERS.register("random")
def random(facts: EvictionFacts, seed: int = 0) -> EvictionOrder:
    """Each entry that may leave with the same probability."""
    generators = iter(np.random.default_rng(seed).spawn(2))
    return both(facts, lambda kind: RandomLeaf(kind, next(generators)))


class RandomLeaf(ListOrder[T]):
    """Entries in any order, among which one is drawn until one is drawn that may leave."""

    def __init__(self, kind: Kind[T], rng: np.random.Generator) -> None:
        super().__init__(kind)
        self._rng = rng
        self._items: list[T] = []
        self._at: dict[T, int] = {}
        self._drawn: T | None = None

    def add(self, items: Sequence[T]) -> None:
        for item in items:
            self._at[item] = len(self._items)
            self._items.append(item)

    def used(self, items: Iterable[T]) -> None:
        """Uses do not matter."""

    def renewed(self, items: Iterable[T]) -> None:
        """Ages do not matter."""

    def split(self, upper: T, lower: T) -> None:
        self.add([upper])

    def removed(self, item: T) -> None:
        at, last = self._at.pop(item), self._items.pop()
        if last is not item:
            self._items[at], self._at[last] = last, at

    def victim(self) -> T | None:
        if self._drawn is None or not self._may_leave(self._drawn):
            self._drawn = self._draw()
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

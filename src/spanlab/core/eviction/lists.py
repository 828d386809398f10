"""Eviction orders of lists and queues, adapted to trees: SLRU, S3-FIFO, SIEVE, ARC, and a random
leaf."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Annotated

import numpy as np

from spanlab.core.eviction.orders import (
    EVICTION_ORDERS,
    Chain,
    EvictionFacts,
    EvictionOrder,
    GhostList,
    Kind,
    ListOrder,
    Names,
    RankedT,
    both,
)
from spanlab.registry import not_negative, positive, share

# ------------------------------------------------------------------------------
# Segmented LRU: entries used once cannot displace entries used twice.
#
# Karedla, Love and Wherry, "Caching strategies to improve disk system performance", Computer
# 27(3), 1994.
# ------------------------------------------------------------------------------


@EVICTION_ORDERS.register("slru")
def slru(
    facts: EvictionFacts,
    protected: Annotated[
        float, share, "share of the store's bytes for the protected segment"
    ] = 0.8,
) -> EvictionOrder:
    """The least recently used entry of the probationary segment, then of the protected one."""
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
        return self._probation.first(self.kind.may_leave) or self._protected.first(
            self.kind.may_leave
        )

    def _segment(self, item: RankedT) -> Chain[RankedT]:
        return self._protected if item in self._protected else self._probation


# ------------------------------------------------------------------------------
# S3-FIFO: three first-in, first-out queues, which evict entries without reuse soon.
#
# Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.
# ------------------------------------------------------------------------------

# limit of the two-bit counter; uses that move an entry from the small to the main queue
MAX_USES, MOVES_AT = 3, 2


@EVICTION_ORDERS.register("s3_fifo")
def s3_fifo(
    facts: EvictionFacts,
    small: Annotated[
        float, share, "share of the store's bytes at which the small queue evicts"
    ] = 0.1,
) -> EvictionOrder:
    """The oldest entry of the small queue at or above its share, else of the main one; used entries
    stay."""
    return both(facts, lambda kind: S3Fifo(kind, small))


class S3Fifo(ListOrder[RankedT]):
    """A small queue for new entries, a main queue, and a ghost list of the names evicted from the
    small one.

    `small`  share of the store's bytes at which the small queue evicts; the ghosts stand for the
             other bytes
    """

    def __init__(self, kind: Kind[RankedT], small: float) -> None:
        super().__init__(kind)
        self._small, self._main = Chain(kind.num_bytes), Chain(kind.num_bytes)
        self._ghosts, self._names = GhostList(), Names(kind.name)
        self._uses: dict[RankedT, int] = {}
        self._share = int(small * kind.capacity)

    def add(self, items: Sequence[RankedT]) -> None:
        for item in items:
            name = self._names.add(item)
            (self._main if name in self._ghosts else self._small).append(item)
            self._ghosts.discard(name)
            self._uses[item] = 0

    def used(self, items: Iterable[RankedT]) -> None:
        for item in items:
            self._uses[item] = min(self._uses[item] + 1, MAX_USES)

    def split(self, upper: RankedT, lower: RankedT) -> None:
        (self._small if lower in self._small else self._main).split(upper, lower)
        self._names.split(upper, lower)
        self._uses[upper] = self._uses[lower]

    def removed(self, item: RankedT) -> None:
        name = self._names.pop(item)
        del self._uses[item]
        if item not in self._small:
            return self._main.remove(item)
        self._small.remove(item)
        self._ghosts.append(name, self.kind.num_bytes(item))
        return self._ghosts.shrink(self.kind.capacity - self._share)

    def victim(self) -> RankedT | None:
        while True:
            small, main = (queue.first(self.kind.may_leave) for queue in (self._small, self._main))
            if small is not None and (main is None or self._small.bytes >= self._share):
                if self._uses[small] < MOVES_AT:
                    return small
                self._small.remove(small)
                self._main.append(small)
            elif main is None or not self._uses[main]:
                return main
            else:
                self._uses[main] -= 1
                self._main.renew(main)


# ------------------------------------------------------------------------------
# SIEVE: first in, first out, where a used entry survives once and keeps its position.
#
# Zhang et al., "SIEVE is simpler than LRU", NSDI 2024.
# ------------------------------------------------------------------------------


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
        # the rest of this pass, one full pass that clears marks, and one over unmarked entries
        while starts < 3:
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


# ------------------------------------------------------------------------------
# ARC: a balance of recency and frequency, adapted to the evicted entries that are stored again.
#
# Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003.
# ------------------------------------------------------------------------------


@EVICTION_ORDERS.register("arc")
def arc(facts: EvictionFacts) -> EvictionOrder:
    """The least recently used entry, of those used once or of those used again, by an adaptive
    target."""
    return both(facts, Arc, by_block=True)


class Arc(ListOrder[RankedT]):
    """Lists of entries used once and used again (T1, T2), and of the names evicted from each (B1,
    B2).

    The store evicts before the order receives the new entry. So the target of T1 changes after the
    eviction that a miss causes. The published choice between T1 and T2 at equality, which depends
    on the missed entry, is always T2.
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
            # change the target in favour of the list that evicted this entry
            num_bytes = self.kind.num_bytes(item)
            once, again = self._once_ghosts, self._again_ghosts
            if name in once:
                increase = num_bytes * max(1.0, again.bytes / once.bytes)
                self._target = min(float(self.kind.capacity), self._target + increase)
            elif name in again:
                decrease = num_bytes * max(1.0, once.bytes / again.bytes)
                self._target = max(0.0, self._target - decrease)
            once.discard(name)
            again.discard(name)
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

    def _trim_ghosts(self) -> None:
        """Limit T1 and B1 together to one capacity, and all four lists to two."""
        capacity = self.kind.capacity
        self._once_ghosts.shrink(max(0, capacity - self._once.bytes))
        used_bytes = self._once.bytes + self._again.bytes + self._once_ghosts.bytes
        self._again_ghosts.shrink(max(0, 2 * capacity - used_bytes))


# ------------------------------------------------------------------------------
# A leaf drawn at random, so that no fixed order of requests is the worst case.
#
# Randomised leaf eviction of arXiv 2601.18999, where its competitive ratio is proven. Of
# several draws the least recently used entry is evicted: an LRU without a list, by the power of
# two choices (Mitzenmacher, IEEE TPDS 12(10), 2001).
# ------------------------------------------------------------------------------


@EVICTION_ORDERS.register("random")
def random(
    facts: EvictionFacts,
    seed: Annotated[int, not_negative, "seed of the draws"] = 0,
    choices: Annotated[int, positive, "draws of which the least recently used is evicted"] = 1,
) -> EvictionOrder:
    """The least recently used of `choices` draws among the candidates."""
    generators = iter(np.random.default_rng(seed).spawn(2))
    return both(facts, lambda kind: RandomLeaf(kind, next(generators), choices))


class RandomLeaf(ListOrder[RankedT]):
    """Entries in arbitrary order; draws are repeated until an entry can be evicted.

    A leaf whose end was evicted stays the victim, so that the number of evictions for some bytes
    does not matter.
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
            if self._items and self._may_leave(
                item := self._items[self._rng.integers(len(self._items))]
            ):
                return item
        free = [item for item in self._items if self._may_leave(item)]
        return free[self._rng.integers(len(free))] if free else None

    def _may_leave(self, item: RankedT) -> bool:
        return item in self._slot and self.kind.may_leave(item)

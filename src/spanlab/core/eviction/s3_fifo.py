"""S3-FIFO: three first-in, first-out queues, which evict entries without reuse soon.

Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spanlab.checks import share
from spanlab.core.eviction.chain import Chain
from spanlab.core.eviction.contract import EVICTION_ORDERS, EvictionFacts, EvictionOrder, Kind, RankedT
from spanlab.core.eviction.ghosts import GhostList, Names
from spanlab.core.eviction.lists import ListOrder, both

MAX_USES, MOVES_AT = 3, 2  # limit of the two-bit counter; uses that move an entry from the small to the main queue


@EVICTION_ORDERS.register("s3_fifo")
def s3_fifo(facts: EvictionFacts, small: float = 0.1) -> EvictionOrder:
    """The oldest entry of the small queue at or above its share, else of the main one; used entries stay."""
    share("eviction_options.small", small)
    return both(facts, lambda kind: S3Fifo(kind, small))


class S3Fifo(ListOrder[RankedT]):
    """A small queue for new entries, a main queue, and a ghost list of the names evicted from the small one.

    `small`  share of the store's bytes at which the small queue evicts; the ghosts stand for the other bytes
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

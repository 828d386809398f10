"""Eviction of KV and states in one budget by the expected work saved per byte and time, learned without parameters.

The value of a state is its index of reuse (`reuse_rates`) times the work between the state above it and itself, which
is its saving beyond that state. Its rank is this value per byte. In hybrid models KV saves nothing without a state: the
rank of a leaf is the value of its states per byte, counting their bytes and all KV that only this leaf needs. In models
of attention alone a leaf has a separate index. The lowest rank is the price of a byte: entries below it are evicted.
 Hit density: Beckmann et al., "LHD: improving cache hit rate by maximizing hit density", NSDI 2018.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic

from spanlab.core.cost import COST
from spanlab.core.eviction.contract import EVICTION_ORDERS, EvictionFacts, EvictionOrder, Kind, RankedT
from spanlab.core.eviction.reuse_rates import ReuseClass, ReuseRates, interval_of
from spanlab.core.eviction_queue import Key
from spanlab.core.tree import Node, State

_SAMPLE = 64  # entries whose ranks are compared


@EVICTION_ORDERS.register("reuse_value", needs=(COST,))
def reuse_value(facts: EvictionFacts) -> EvictionOrder:
    """The least expected work saved per byte and time, by past reuses; of a sample of at most 64 candidates."""
    learned = _Learned()
    states = _States(facts.states, learned)
    return EvictionOrder(facts.watched(_Leaves(facts, learned, states)), states, by_block=True)


@dataclass
class _Learned:
    """Estimates that leaves and states share; `now` is the latest use on the clock of the store."""

    now: int = 0
    rates: ReuseRates = field(default_factory=ReuseRates)
    rng: random.Random = field(default_factory=lambda: random.Random(0))


class _Entries(ABC, Generic[RankedT]):
    """Entries of one kind, with the last use and the last known class of each."""

    def __init__(self, kind: Kind[RankedT], learned: _Learned) -> None:
        self.kind, self._learned = kind, learned
        self._since: dict[RankedT, int] = {}
        self._counted: dict[RankedT, int] = {}  # age up to which the time of an entry has been counted
        self._class: dict[RankedT, ReuseClass] = {}
        self._items: list[RankedT] = []
        self._slot: dict[RankedT, int] = {}  # index in `_items`

    @abstractmethod
    def class_of(self, item: RankedT) -> ReuseClass:
        """The class of an entry; entries of one class share a rate of reuse."""

    @abstractmethod
    def value(self, item: RankedT) -> float:
        """Expected work saved per byte of an entry and time."""

    def add(self, items: Sequence[RankedT]) -> None:
        self.renewed(items)
        for item in items:
            self._append(item)

    def used(self, items: Iterable[RankedT]) -> None:
        for item in items:
            age = item.used - self._since[item]
            self._learned.rates.add_reuse(self._class[item], self._counted[item], age)  # class of the last renewal
            self._renew(item)

    def renewed(self, items: Iterable[RankedT]) -> None:
        for item in items:
            self._renew(item)

    def offer(self, item: RankedT) -> None:
        """Do nothing: the sample checks which entries can be evicted."""

    def split(self, upper: RankedT, lower: RankedT) -> None:
        self._since[upper], self._counted[upper] = self._since[lower], self._counted[lower]
        self._class[upper] = self._class[lower]
        self._append(upper)

    def removed(self, item: RankedT) -> None:
        age = self._learned.now - self._since.pop(item)
        self._learned.rates.add_time(self._class.pop(item), self._counted.pop(item), age)
        slot, last = self._slot.pop(item), self._items.pop()
        if last is not item:
            self._items[slot], self._slot[last] = last, slot

    def lowest(self) -> tuple[Key, RankedT] | None:
        ranks = [((self.value(item), item.used, item.serial), item) for item in self._sample()]
        return min(ranks, key=lambda rank: rank[0], default=None)

    def index(self, item: RankedT) -> float:
        """The index of reuse of an entry, in reuses per time."""
        self._class[item] = reuse_class = self.class_of(item)
        age, rates = self._learned.now - self._since[item], self._learned.rates
        if interval_of(age) > interval_of(self._counted[item]):
            rates.add_time(reuse_class, self._counted[item], age)
            self._counted[item] = age
        return rates.index(reuse_class, age)

    def _append(self, item: RankedT) -> None:
        self._slot[item] = len(self._items)
        self._items.append(item)

    def _renew(self, item: RankedT) -> None:
        self._since[item], self._counted[item] = item.used, 0
        self._class[item] = self.class_of(item)
        self._learned.now = max(self._learned.now, item.used)

    def _sample(self) -> list[RankedT]:
        """Candidates to rank: all of a small set of entries, or a sample of a large one."""
        for draws in (4 * _SAMPLE, len(self._items)):
            items = self._items if len(self._items) <= draws else self._learned.rng.sample(self._items, draws)
            free = [item for item in items if self.kind.may_leave(item)]
            if free:
                break
        return free[:_SAMPLE] if len(items) < len(self._items) else free


class _States(_Entries[State]):
    """Recurrent states; the class records whether a deeper state may be stored behind a state."""

    @property
    def ever_stored(self) -> bool:
        """Whether any state is, or was, stored."""
        return self._learned.rates.has_kind("state") or bool(self._items)

    def class_of(self, item: State) -> ReuseClass:
        node = item.node
        assert node is not None, "a state is ranked while it is stored"
        inner = node.states[-1] is not item or any(child.states or child.children for child in node.children.values())
        return ReuseClass("state", item.uses, inner)

    def value(self, item: State) -> float:
        return self.index(item) * self.kind.work(item) / max(1, item.num_bytes)


class _Leaves(_Entries[Node]):
    """KV; the class records whether anything is stored behind an edge."""

    def __init__(self, facts: EvictionFacts, learned: _Learned, states: _States) -> None:
        super().__init__(facts.leaves, learned)
        self._states, self._work = states, facts.cost

    def class_of(self, item: Node) -> ReuseClass:
        return ReuseClass("leaf", item.uses, bool(item.children))

    def value(self, item: Node) -> float:
        if not self._states.ever_stored:
            return self.index(item) * self.kind.work(item) / max(1, self.kind.num_bytes(item))
        if not item.states:
            return 0.0
        assert item.parent is not None, "the root is no leaf"
        above = item.parent.deepest_state(item.start)
        start = 0 if above is None else above.position
        saved = sum(self._states.index(state) * self._work(start, state.position) for state in item.states)
        return saved / max(1, self._exclusive_bytes(item) + sum(state.num_bytes for state in item.states))

    def _exclusive_bytes(self, leaf: Node) -> int:
        """Bytes of KV that only this leaf needs: its KV, and that above it up to a state or a fork."""
        num_bytes, above = self.kind.num_bytes(leaf), leaf.parent
        while above is not None and above.parent is not None and len(above.children) == 1 and not above.states:
            num_bytes += self.kind.num_bytes(above)
            above = above.parent
        return num_bytes

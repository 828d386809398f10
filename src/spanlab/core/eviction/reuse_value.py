"""KV and states in one budget, by the work that a byte is expected to save per time; nothing is set, all is learned.

The value of a state is its index of reuse (`reuse_rates`) times the work between the state above it and itself: what
it saves beyond its neighbour. It is ranked by that value for its bytes. In hybrid models KV saves nothing without a
state: a leaf is ranked by the values of its states, for their bytes and those of all KV that nothing else needs. In
models of attention alone a leaf has an index of its own. The least rank is the price of a byte: what is worth less
leaves. Hit density: Beckmann et al., "LHD: improving cache hit rate by maximizing hit density", NSDI 2018.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic

from spanlab.core.cost import COST
from spanlab.core.eviction.contract import EVICTION_ORDERS, EvictionFacts, EvictionOrder, Kind
from spanlab.core.eviction.lists import T
from spanlab.core.eviction.reuse_rates import ReuseClass, ReuseRates, interval_of
from spanlab.core.eviction_queue import Key
from spanlab.core.tree import Node, State

_SAMPLE = 64  # entries whose ranks are compared


@EVICTION_ORDERS.register("reuse_value", needs=(COST,))
def reuse_value(facts: EvictionFacts) -> EvictionOrder:
    """The least work saved per byte and time, as reuses so far let expect; of at most 64 entries drawn."""
    learned = _Learned()
    states = _States(facts.states, learned)
    return EvictionOrder(facts.watched(_Leaves(facts, learned, states)), states)


@dataclass
class _Learned:
    """What leaves and states share; `now` is the latest use on the clock of the store."""

    now: int = 0
    rates: ReuseRates = field(default_factory=ReuseRates)
    rng: random.Random = field(default_factory=lambda: random.Random(0))


class _Entries(ABC, Generic[T]):
    """Entries of one kind: since when each has not been used, and the class that it was last found in."""

    def __init__(self, kind: Kind[T], learned: _Learned) -> None:
        self.kind, self._learned = kind, learned
        self._since: dict[T, int] = {}
        self._counted: dict[T, int] = {}  # ages up to which its time has been counted
        self._class: dict[T, ReuseClass] = {}
        self._items: list[T] = []
        self._at: dict[T, int] = {}

    @abstractmethod
    def class_of(self, item: T) -> ReuseClass:
        """Entries of one class are reused alike."""

    @abstractmethod
    def value(self, item: T) -> float:
        """Work that a byte of it is expected to save per time."""

    def add(self, items: Sequence[T]) -> None:
        self.renewed(items)
        for item in items:
            self._put(item)

    def used(self, items: Iterable[T]) -> None:
        for item in items:
            age = item.used - self._since[item]
            self._learned.rates.reused(self._class[item], self._counted[item], age)  # its node may have been cut
            self._renew(item)

    def renewed(self, items: Iterable[T]) -> None:
        for item in items:
            self._renew(item)

    def offer(self, item: T) -> None:
        """Entries that may leave are told apart when they are drawn."""

    def split(self, upper: T, lower: T) -> None:
        self._since[upper], self._counted[upper] = self._since[lower], self._counted[lower]
        self._class[upper] = self._class[lower]
        self._put(upper)

    def removed(self, item: T) -> None:
        age = self._learned.now - self._since.pop(item)
        self._learned.rates.spent(self._class.pop(item), self._counted.pop(item), age)
        at, last = self._at.pop(item), self._items.pop()
        if last is not item:
            self._items[at], self._at[last] = last, at

    def lowest(self) -> tuple[Key, T] | None:
        ranks = [((self.value(item), item.used, item.serial), item) for item in self._drawn()]
        return min(ranks, key=lambda rank: rank[0], default=None)

    def index(self, item: T) -> float:
        """Its reuses per time."""
        self._class[item] = found = self.class_of(item)
        age, rates = self._learned.now - self._since[item], self._learned.rates
        if interval_of(age) > interval_of(self._counted[item]):
            rates.spent(found, self._counted[item], age)
            self._counted[item] = age
        return rates.index(found, age)

    def _put(self, item: T) -> None:
        self._at[item] = len(self._items)
        self._items.append(item)

    def _renew(self, item: T) -> None:
        self._since[item], self._counted[item] = item.used, 0
        self._class[item] = self.class_of(item)
        self._learned.now = max(self._learned.now, item.used)

    def _drawn(self) -> list[T]:
        """Entries that may leave: all of a few, a sample of many."""
        for draws in (4 * _SAMPLE, len(self._items)):
            items = self._items if len(self._items) <= draws else self._learned.rng.sample(self._items, draws)
            free = [item for item in items if self.kind.may_leave(item)]
            if free:
                break
        return free[:_SAMPLE] if len(items) < len(self._items) else free


class _States(_Entries[State]):
    """Recurrent states; a class tells whether a deeper one may be stored behind a state."""

    @property
    def any(self) -> bool:
        """Whether there is any, or was."""
        return self._learned.rates.knows("state") or bool(self._items)

    def class_of(self, item: State) -> ReuseClass:
        node = item.node
        assert node is not None, "a state is looked at while it is stored"
        inner = node.states[-1] is not item or any(child.states or child.children for child in node.children.values())
        return ReuseClass("state", item.uses, inner)

    def value(self, item: State) -> float:
        return self.index(item) * self.kind.work(item) / max(1, item.num_bytes)


class _Leaves(_Entries[Node]):
    """KV; a class tells whether anything is stored behind an edge."""

    def __init__(self, facts: EvictionFacts, learned: _Learned, states: _States) -> None:
        super().__init__(facts.leaves, learned)
        self._states, self._work = states, facts.cost

    def class_of(self, item: Node) -> ReuseClass:
        return ReuseClass("leaf", item.uses, bool(item.children))

    def value(self, item: Node) -> float:
        if not self._states.any:
            return self.index(item) * self.kind.work(item) / max(1, self.kind.num_bytes(item))
        if not item.states:
            return 0.0
        assert item.parent is not None, "the root is no leaf"
        above = item.parent.deepest_state(item.start)
        start = 0 if above is None else above.position
        saved = sum(self._states.index(state) * self._work(start, state.position) for state in item.states)
        return saved / max(1, self._alone(item) + sum(state.num_bytes for state in item.states))

    def _alone(self, leaf: Node) -> int:
        """Bytes of KV that saves nothing without this leaf: its own, and that above it up to a state or a fork."""
        num_bytes, above = self.kind.num_bytes(leaf), leaf.parent
        while above is not None and above.parent is not None and len(above.children) == 1 and not above.states:
            num_bytes += self.kind.num_bytes(above)
            above = above.parent
        return num_bytes

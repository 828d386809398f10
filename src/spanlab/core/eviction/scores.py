"""Candidates of the eviction orders in `value`: entries ranked by the work that they save per byte.

They have a file of their own because it is compiled; a file that registers orders is not.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spanlab.core.eviction.orders import EvictionFacts, Kind, RankedT
from spanlab.core.request import Request
from spanlab.core.tree import EvictionQueue, Key, Node, PrefixTree, State

# ------------------------------------------------------------------------------
# GreedyDual-Size-Frequency: the work that an entry saves per byte, with a clock that ages old
# uses.
#
# Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching
# policy", HP Labs HPL-98-69, 1998.
# ------------------------------------------------------------------------------


class Clock:
    """The highest value of an evicted entry; leaves and states share it."""

    def __init__(self) -> None:
        self.value = 0.0


class Gdsf(Generic[RankedT]):
    """Values of entries, set at each use, which never decrease; a newly stored entry counts one
    use."""

    def __init__(self, kind: Kind[RankedT], clock: Clock) -> None:
        self._kind, self._clock = kind, clock
        self._value: dict[RankedT, float] = {}
        self._queue: EvictionQueue[RankedT] = EvictionQueue(
            lambda item: (self._value.get(item, 0.0), item.serial), kind.may_leave
        )

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


# ------------------------------------------------------------------------------
# Marconi's score: recency of the last use plus weighted FLOPs saved per byte.
#
# Pan et al., "Marconi: prefix caching for the era of hybrid LLMs", MLSys 2025, arXiv
# 2411.19379; from its formula. The paper tunes alpha on-line, as `marconi_tuned` does. There an
# entry is a state with the KV of its edge; here states and edges have separate scores.
# ------------------------------------------------------------------------------


class Marconi(Generic[RankedT]):
    """Entries by a score that depends on all candidates; each eviction scores all of them.

    `alpha`  weight of the FLOPs; 0 is LRU
    """

    def __init__(self, kind: Kind[RankedT], alpha: float) -> None:
        self.kind, self.alpha = kind, alpha
        self._free: dict[RankedT, None] = {}

    def add(self, items: Sequence[RankedT]) -> None:
        self._free.update(dict.fromkeys(items))

    def used(self, items: Iterable[RankedT]) -> None:
        """Do nothing: the score reads the last use from the entry."""

    def renewed(self, items: Iterable[RankedT]) -> None:
        """Do nothing: the score reads the last use from the entry."""

    def offer(self, item: RankedT) -> None:
        if self.kind.may_leave(item):
            self._free[item] = None

    def split(self, upper: RankedT, lower: RankedT) -> None:
        """Do nothing: the upper node is offered when the lower one is removed."""

    def removed(self, item: RankedT) -> None:
        self._free.pop(item, None)

    def lowest(self) -> tuple[Key, RankedT] | None:
        candidates = [item for item in self._free if self.kind.may_leave(item)]
        self._free = dict.fromkeys(candidates)
        if not candidates:
            return None
        used = np.array([item.used for item in candidates], dtype=np.float64)
        saved = np.array(
            [self.kind.work(item) / max(1, self.kind.num_bytes(item)) for item in candidates]
        )
        scores = _scaled(1.0 / (used.max() - used + 1.0)) + self.alpha * _scaled(saved)
        score, _, item = min(
            zip(scores.tolist(), [item.serial for item in candidates], candidates, strict=True)
        )
        return (score, item.serial), item


def _scaled(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale values to [0, 1]; 0 where all are equal."""
    width = np.ptp(values)
    return (values - values.min()) / width if width else np.zeros_like(values)


# ------------------------------------------------------------------------------
# Marconi's score with an alpha that is chosen by replaying the first requests.
#
# As in the paper (arXiv 2411.19379), alpha is 0 until the n-th request needs the first
# eviction. When 5 · n requests have been admitted, they are replayed under each alpha, and the
# alpha that saves most FLOPs is used from then on. Nothing was evicted before the n-th request,
# so the replay starts from an empty cache. It serves whole prompts one after another and stores
# KV; the score of states uses the same alpha.
# ------------------------------------------------------------------------------

ALPHAS: tuple[float, ...] = tuple(np.linspace(0.0, 2.0, 21).round(1).tolist())


class TunedLeaves(Marconi[Node]):
    """Leaves by Marconi's score; records requests until alpha is chosen."""

    def __init__(self, facts: EvictionFacts, states: Marconi[State], window: float) -> None:
        super().__init__(facts.leaves, 0.0)
        self._facts, self._states, self._window = facts, states, window
        self._requests: list[Request] = []
        self._first_eviction: int | None = None  # requests admitted by then
        self._chosen = False

    def admitted(self, request: Request) -> None:
        """Record a request; after the last one of the window, choose alpha."""
        if self._chosen:
            return
        self._requests.append(request)
        first = self._first_eviction
        if first is not None and len(self._requests) >= self._window * first:
            self._chosen = True
            self.alpha = self._states.alpha = best_alpha(self._facts, self._requests)
            self._requests = []

    def lowest(self) -> tuple[Key, Node] | None:
        if self._first_eviction is None:
            self._first_eviction = len(self._requests)
        return super().lowest()


def best_alpha(facts: EvictionFacts, requests: list[Request]) -> float:
    """Return the alpha that saves most FLOPs; the smallest among equals."""
    return max(ALPHAS, key=lambda alpha: (saved_flops(facts, alpha, requests), -alpha))


def saved_flops(facts: EvictionFacts, alpha: float, requests: list[Request]) -> float:
    """Return the FLOPs that a cache like that of `facts` saves under one alpha."""
    replay = Replay(facts, alpha)
    return sum(facts.work(0, replay.serve(request)) for request in requests)


class Replay:
    """A cache that serves prompts one after another, with the time stamps of a store."""

    def __init__(self, facts: EvictionFacts, alpha: float) -> None:
        self._tree = PrefixTree(facts.tree.block_size, facts.tree.fixed_blocks)
        kind = replace(facts, tree=self._tree).leaves
        self._leaves = Marconi(kind, alpha)
        self._max_tokens = kind.capacity // max(1, facts.token_bytes)
        self._roots: dict[str, Node] = {}
        self._clock = 0

    def serve(self, request: Request) -> int:
        """Reuse the stored prefix of a prompt and store the suffix, if it fits; return the reused
        tokens."""
        tree, tokens, size = self._tree, request.string, self._tree.block_size
        root = self._roots.setdefault(request.cache_salt, tree.new_root())
        match_node, matched = tree.match(root, tokens)
        reused = tree.extend(
            root, tokens, min(matched, len(tokens) - 1) // size * size, self._tick()
        )
        self._use(match_node)
        if self._make_room(reused, len(tokens) - reused.depth):
            end = tree.extend(reused, tokens, len(tokens) // size * size, self._tick())
            self._leaves.add([end])
            self._use(end)
        return reused.depth

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _use(self, end: Node) -> None:
        now = self._tick()
        for node in end.path():
            node.used = now

    def _make_room(self, reused: Node, tokens: int) -> bool:
        """Evict leaves outside the reused path until `tokens` more fit; return False where they
        cannot fit."""
        for node in reused.path():
            node.locks += 1
        victim = self._victim(tokens)
        while victim is not None:
            self._leaves.removed(victim)
            self._leaves.offer(self._tree.remove(victim))
            victim = self._victim(tokens)
        for node in reused.path():
            node.locks -= 1
        self._leaves.offer(reused)
        return self._tree.num_tokens + tokens <= self._max_tokens

    def _victim(self, tokens: int) -> Node | None:
        if self._tree.num_tokens + tokens <= self._max_tokens:
            return None
        lowest = self._leaves.lowest()
        return lowest[1] if lowest else None


# ------------------------------------------------------------------------------
# Rates of reuse of entries, by class and age.
#
# An entry is at risk of being reused from one use to the next. At age a its rate of reuse is
# the number of reuses at that age over the time that entries have spent at that age (a
# piecewise constant hazard). An entry that is evicted, or still stored, counts with the time
# that it has spent: it is censored, which does not bias a hazard. Ages are cut into two
# intervals per octave. The prior rate at age a is 1 / (2 · a), as for reuse distances with a
# heavy tail, so that the least recently used entry has the lowest value. The prior weighs as
# one reuse in the estimate of all entries together; that estimate weighs as one reuse in the
# estimate of each class.
#
# The value of an entry is its reuses per time that it is stored, over the best time to continue
# storing it:
#
#     index(a) = max over T > a of  P(reused before T) / E[time until it is reused or T is
#     reached],
#
# the Gittins index of one entry, and the greatest price per time at which storing it still
# pays.
# ------------------------------------------------------------------------------

Floats = NDArray[np.float64]

_INTERVALS = 64
_EDGES = np.concatenate([[0.0], 2.0 ** (np.arange(_INTERVALS) / 2)])
WIDTHS = np.diff(_EDGES)
_STARTS = _EDGES[:-1]
_PRIOR = 1.0 / (_EDGES[:-1] + _EDGES[1:])  # 1 / (2 · a) in the middle of an interval
_LATER = np.triu(np.ones((_INTERVALS, _INTERVALS), dtype=bool))  # ends that lie behind a start
_REFRESH = 16  # observations between two estimates


_FIRST_AGES = [1, *[math.ceil(2 ** (edge / 2)) for edge in range(1, _INTERVALS - 1)]]


def interval_of(age: int) -> int:
    """The index of the interval that contains an age."""
    return bisect_right(_FIRST_AGES, age)


def index_of(rates: Floats) -> Floats:
    """Return the Gittins index at the start of each interval of `WIDTHS`; same shape as `rates`."""
    hazard = rates * WIDTHS
    survival = np.ones(_INTERVALS + 1)
    survival[1:] = np.exp(-hazard.cumsum())
    reused = survival[:-1] - survival[1:]
    time = reused / rates
    total_reused, total_time = reused.cumsum(), time.cumsum()
    gains = total_reused[None, :] - (total_reused - reused)[:, None]
    times = total_time[None, :] - (total_time - time)[:, None]
    ratio = np.divide(gains, times, out=np.zeros_like(gains), where=_LATER & (times > 0))
    index: Floats = np.maximum(ratio.max(axis=1), rates)
    return index


class ReuseClass(NamedTuple):
    """Entries with a common rate of reuse.

    `kind`   "state" or "leaf"
    `uses`   number of uses
    `inner`  whether anything is stored behind the entry
    """

    kind: str
    uses: int
    inner: bool

    @property
    def coarse(self) -> ReuseClass:
        """The class by uses 0, 1, 2, 3, 4 to 7, 8 to 15 and so on."""
        return self if self.uses < 4 else self._replace(uses=1 << self.uses.bit_length() - 1)


class ReuseRates:
    """Reuses and time at risk by class and age."""

    def __init__(self) -> None:
        # sums by class and interval, and the row of each class
        self._reuses = np.zeros((1, _INTERVALS))
        self._time = np.zeros((1, _INTERVALS))
        self._row: dict[ReuseClass, int] = {}
        self._index: dict[ReuseClass, list[float]] = {}
        self._observed = 0

    def has_kind(self, kind: str) -> bool:
        """Whether time of an entry of a kind was counted."""
        return any(reuse_class.kind == kind for reuse_class in self._row)

    def add_time(self, reuse_class: ReuseClass, start: int, stop: int) -> None:
        """Count the time from age `start` to age `stop`, in which an entry of a class was not
        reused."""
        row = self._row.setdefault(reuse_class.coarse, len(self._row))
        if row == len(self._time):
            more = np.zeros_like(self._time)
            self._reuses, self._time = (
                np.concatenate([sums, more]) for sums in (self._reuses, self._time)
            )
        times = np.minimum(np.maximum(stop - _STARTS, 0.0), WIDTHS)
        if start:
            times -= np.minimum(np.maximum(start - _STARTS, 0.0), WIDTHS)
        self._time[row] += times
        self._observed += 1
        if self._observed % _REFRESH == 0:
            self._index.clear()

    def add_reuse(self, reuse_class: ReuseClass, start: int, age: int) -> None:
        """Count the reuse of an entry of a class at an age, and its time since age `start`."""
        self.add_time(reuse_class, start, age)
        self._reuses[self._row[reuse_class.coarse], interval_of(age)] += 1.0

    def index(self, reuse_class: ReuseClass, age: int) -> float:
        """The Gittins index of an entry of a class and age, in reuses per time."""
        index = self._index.get(reuse_class)
        if index is None:
            coarse = reuse_class.coarse
            index = self._index.get(coarse)
            if index is None:
                reuses, time = self._reuses.sum(axis=0), self._time.sum(axis=0)
                common = (reuses + 1.0) / (time + 1.0 / _PRIOR)
                row = self._row.get(coarse)
                reused, at_risk = (
                    (0.0, 0.0) if row is None else (self._reuses[row], self._time[row])
                )
                rates: Floats = (reused + 1.0) / (at_risk + 1.0 / common)
                index = index_of(rates).tolist()
            self._index[reuse_class] = self._index[coarse] = index
        return index[interval_of(age)]


# ------------------------------------------------------------------------------
# Eviction of KV and states in one budget by the expected work saved per byte and time, learned
# without parameters.
#
# The value of a state is its index of reuse (`ReuseRates`) times the work between the state above
# it and itself, which is its saving beyond that state. Its rank is this value per byte. In hybrid
# models KV saves nothing without a state: the rank of a leaf is the value of its states per byte,
# counting their bytes and all KV that only this leaf needs. In models of attention alone a leaf
# has a separate index. The lowest rank is the price of a byte: entries below it are evicted.
# Hit density: Beckmann et al., "LHD: improving cache hit rate by maximizing hit density", NSDI
# 2018.
# ------------------------------------------------------------------------------

_SAMPLE = 64  # entries whose ranks are compared


@dataclass
class Learned:
    """Estimates that leaves and states share; `now` is the latest use on the clock of the store."""

    now: int = 0
    rates: ReuseRates = field(default_factory=ReuseRates)
    rng: random.Random = field(default_factory=lambda: random.Random(0))


class _Entries(ABC, Generic[RankedT]):
    """Entries of one kind, with the last use and the last known class of each."""

    def __init__(self, kind: Kind[RankedT], learned: Learned) -> None:
        self.kind, self._learned = kind, learned
        self._since: dict[RankedT, int] = {}
        # age up to which the time of an entry has been counted
        self._counted: dict[RankedT, int] = {}
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
            # class of the last renewal
            self._learned.rates.add_reuse(self._class[item], self._counted[item], age)
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
        # candidates to rank: all of a small set of entries, or a sample of a large one
        for draws in (4 * _SAMPLE, len(self._items)):
            items = (
                self._items
                if len(self._items) <= draws
                else self._learned.rng.sample(self._items, draws)
            )
            free = [item for item in items if self.kind.may_leave(item)]
            if free:
                break
        sample = free[:_SAMPLE] if len(items) < len(self._items) else free
        ranks = [((self.value(item), item.used, item.serial), item) for item in sample]
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


class ReuseStates(_Entries[State]):
    """Recurrent states; the class records whether a deeper state may be stored behind a state."""

    @property
    def ever_stored(self) -> bool:
        """Whether any state is, or was, stored."""
        return self._learned.rates.has_kind("state") or bool(self._items)

    def class_of(self, item: State) -> ReuseClass:
        node = item.node
        assert node is not None, "a state is ranked while it is stored"
        inner = node.states[-1] is not item or any(
            child.states or child.children for child in node.children.values()
        )
        return ReuseClass("state", item.uses, inner)

    def value(self, item: State) -> float:
        return self.index(item) * self.kind.work(item) / max(1, item.num_bytes)


class ReuseLeaves(_Entries[Node]):
    """KV; the class records whether anything is stored behind an edge."""

    def __init__(self, facts: EvictionFacts, learned: Learned, states: ReuseStates) -> None:
        super().__init__(facts.leaves, learned)
        self._states, self._work = states, facts.work

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
        saved = sum(
            self._states.index(state) * self._work(start, state.position) for state in item.states
        )
        # bytes of KV that only this leaf needs: its KV, and that above it up to a state or a fork
        num_bytes, upper = self.kind.num_bytes(item), item.parent
        while (
            upper is not None
            and upper.parent is not None
            and len(upper.children) == 1
            and not upper.states
        ):
            num_bytes += self.kind.num_bytes(upper)
            upper = upper.parent
        return saved / max(1, num_bytes + sum(state.num_bytes for state in item.states))

"""Priority, which a duration may end: what has the lowest one leaves first, among equals the longest unused.

As TensorRT-LLM retains blocks: a use gives an entry the priority that its request names, or leaves the one that is
there, and then without an end; a duration starts anew when a use ends. What expires has the usual priority, 35.
Mooncake's soft pin is a high priority with a duration, and what expires keeps its age (`expired=by_use`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spanlab.checks import one_of
from spanlab.core.eviction.contract import EVICTION_ORDERS, REQUESTS, EvictionFacts, EvictionOrder, Kind
from spanlab.core.eviction.lists import T
from spanlab.core.eviction.ranked_heap import RankedHeap
from spanlab.core.eviction.retention import USUAL, Retention, Retentions, parsed
from spanlab.core.eviction_queue import Key
from spanlab.core.moment import Moment
from spanlab.core.tree import Node, State

EXPIRED = ("newest", "by_use")


@EVICTION_ORDERS.register("priority", needs=(REQUESTS,))
def priority(
    facts: EvictionFacts,
    ranges: list[dict[str, Any]] | None = None,
    decode: int = USUAL,
    decode_seconds: float | None = None,
    expired: str = "newest",
) -> EvictionOrder:
    """The lowest priority first, then the longest unused; what expires is as new, or keeps its age.

    `ranges`  objects of start, stop, priority and seconds: positions of the prompt
    """
    one_of("eviction_options.expired", expired, EXPIRED)
    output = Retention(0, None, decode, decode_seconds)
    output.check("eviction_options.decode")
    size = facts.tree.block_size
    said = Said(Retentions(parsed("eviction_options.ranges", ranges or []), output, size), facts.moment)

    def cut(node: Node) -> list[Node]:
        """One part for each thing that is said about a new edge."""
        return [*[facts.tree.split(node, depth) for depth in said.cuts(node)], node]

    def block(state: State) -> int:
        return (state.position - 1) // size * size

    renews = expired == "newest"
    leaves = Prioritised(facts.leaves, lambda node: said.of(node.start), cut, renews, facts.moment)
    states = Prioritised(facts.states, lambda state: said.of(block(state)), lambda state: [state], renews, facts.moment)
    return EvictionOrder(facts.watched(leaves), states)


class Said:
    """What the request of the moment says about a path."""

    def __init__(self, rules: Retentions, moment: Moment) -> None:
        self._rules, self._moment = rules, moment

    def of(self, start: int) -> Retention | None:
        """What is said about the block that starts at a position."""
        return self._rules.of(start, self._prompt)

    def cuts(self, node: Node) -> list[int]:
        """Depths at which something else is said about a new edge, increasing."""
        return self._rules.cuts(node.start, node.depth, self._prompt)

    @property
    def _prompt(self) -> int:
        assert self._moment.request is not None, "entries are stored and used for a request"
        return self._moment.request.num_tokens


@dataclass
class Kept:
    """An entry's priority, the nanoseconds that it lasts, the end of its last use, and when it expires."""

    priority: int
    lasts: int | None
    since: int = 0
    ends: int | None = None


class Prioritised(RankedHeap[T]):
    """Entries by priority in a heap, whose stale ranks are corrected when they surface, and those that expire.

    `said`    what the current request says about an entry
    `cut`     parts of a new entry, about each of which one thing is said
    `renews`  what expires counts as used at that time
    """

    def __init__(
        self,
        kind: Kind[T],
        said: Callable[[T], Retention | None],
        cut: Callable[[T], list[T]],
        renews: bool,
        moment: Moment,
    ) -> None:
        super().__init__(kind, self._by_priority)
        self._said, self._cut, self._renews, self._moment = said, cut, renews, moment
        self._kept: dict[T, Kept] = {}
        self._expiring: list[tuple[int, int, T]] = []

    def add(self, items: Sequence[T]) -> None:
        for item in items:
            for part in self._cut(item):
                said = self._said(part) or Retention()
                self._kept[part] = Kept(said.priority, said.lasts_ns)
                self._start(part)

    def used(self, items: Iterable[T]) -> None:
        for item in items:
            said, kept = self._said(item), self._kept[item]
            kept.priority = said.priority if said else kept.priority
            kept.lasts = said.lasts_ns if said else None
            self._start(item)

    def renewed(self, items: Iterable[T]) -> None:
        for item in items:
            self._start(item)

    def _start(self, item: T) -> None:
        kept = self._kept[item]
        kept.since = self._moment.now
        kept.ends = None if kept.lasts is None else kept.since + kept.lasts
        self._expect(item)
        self.offer(item)

    def _expect(self, item: T) -> None:
        ends = self._kept[item].ends
        if ends is not None:
            self._pushed += 1
            heapq.heappush(self._expiring, (ends, self._pushed, item))

    def split(self, upper: T, lower: T) -> None:
        if lower in self._kept:  # else a new edge, which is being cut
            self._kept[upper] = replace(self._kept[lower])
            self._expect(upper)

    def removed(self, item: T) -> None:
        del self._kept[item]

    def lowest(self) -> tuple[Key, T] | None:
        self._expire()
        return super().lowest()

    def _expire(self) -> None:
        """Give what has expired the usual priority; what is in use starts anew."""
        while self._expiring and self._expiring[0][0] <= self._moment.now:
            ends, _, item = heapq.heappop(self._expiring)
            kept = self._kept.get(item)
            if kept is None or kept.ends != ends:
                continue
            if item.locks:
                self._start(item)
                continue
            kept.priority, kept.lasts, kept.ends = USUAL, None, None
            if self._renews:
                kept.since = ends
            self.offer(item)

    def _by_priority(self, item: T) -> Key:
        kept = self._kept[item]
        return kept.priority, kept.since, item.used, item.serial

"""Eviction by priority, optionally with a duration: lowest priority first, then least recently used.

The rules are those of TensorRT-LLM's block retention. A use sets an entry's priority and duration to those of its
request. If the request sets none, the entry keeps its priority and loses its duration. A duration restarts when a use
ends. An expired entry has the default priority, 35. Mooncake's soft pin is a high priority with a duration, and an
expired entry keeps its age (`expired=by_use`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spanlab.checks import one_of
from spanlab.core.eviction.contract import EVICTION_ORDERS, REQUESTS, EvictionFacts, EvictionOrder, Kind, RankedT
from spanlab.core.eviction.ranked_heap import RankedHeap
from spanlab.core.eviction.retention import DEFAULT_PRIORITY, Retention, RetentionRules, parse_ranges
from spanlab.core.eviction_queue import Key
from spanlab.core.moment import Moment
from spanlab.core.tree import Node, State

EXPIRED = ("newest", "by_use")


@EVICTION_ORDERS.register("priority", needs=(REQUESTS,))
def priority(
    facts: EvictionFacts,
    ranges: list[dict[str, Any]] | None = None,
    decode: int = DEFAULT_PRIORITY,
    decode_seconds: float | None = None,
    expired: str = "newest",
) -> EvictionOrder:
    """The lowest priority first, then the least recently used; an expired entry is as new, or keeps its age.

    `ranges`  objects of start, stop, priority and seconds: positions of the prompt
    """
    one_of("eviction_options.expired", expired, EXPIRED)
    output = Retention(0, None, decode, decode_seconds)
    output.check("eviction_options.decode")
    size = facts.tree.block_size
    retention = RetentionRules(parse_ranges("eviction_options.ranges", ranges or []), output, size, facts.moment)

    def split(node: Node) -> list[Node]:
        """Split a new edge into nodes with one retention each."""
        return [*[facts.tree.split(node, depth) for depth in retention.split_depths(node.start, node.depth)], node]

    def of_state(state: State) -> Retention | None:
        return retention.at_block((state.position - 1) // size * size)

    refreshes, moment = expired == "newest", facts.moment
    leaves = PriorityCandidates(facts.leaves, lambda node: retention.at_block(node.start), split, refreshes, moment)
    states = PriorityCandidates(facts.states, of_state, lambda state: [state], refreshes, moment)
    return EvictionOrder(facts.watched(leaves), states)


@dataclass
class RetentionEntry:
    """Retention of an entry; times in nanoseconds.

    `duration`    how long the priority holds; None: without an end
    `since`       end of the last use
    `expires_at`  None: never
    """

    priority: int
    duration: int | None
    since: int = 0
    expires_at: int | None = None


class PriorityCandidates(RankedHeap[RankedT]):
    """Entries in a heap by priority, and a second heap by expiry time.

    `retention_of`  retention that the current request sets for an entry; None: it sets none
    `split`         splits a new entry into entries with one retention each
    `refreshes`     whether an expired entry counts as used at its expiry time
    """

    def __init__(
        self,
        kind: Kind[RankedT],
        retention_of: Callable[[RankedT], Retention | None],
        split: Callable[[RankedT], list[RankedT]],
        refreshes: bool,
        moment: Moment,
    ) -> None:
        super().__init__(kind, self._by_priority)
        self._retention_of, self._split_new, self._refreshes, self._moment = retention_of, split, refreshes, moment
        self._retained: dict[RankedT, RetentionEntry] = {}
        self._expiring: list[tuple[int, int, RankedT]] = []

    def add(self, items: Sequence[RankedT]) -> None:
        for item in items:
            for entry in self._split_new(item):
                retention = self._retention_of(entry) or Retention()
                self._retained[entry] = RetentionEntry(retention.priority, retention.duration_ns)
                self._restart(entry)

    def used(self, items: Iterable[RankedT]) -> None:
        for item in items:
            retention, retained = self._retention_of(item), self._retained[item]
            retained.priority = retention.priority if retention else retained.priority
            retained.duration = retention.duration_ns if retention else None
            self._restart(item)

    def renewed(self, items: Iterable[RankedT]) -> None:
        for item in items:
            self._restart(item)

    def _restart(self, item: RankedT) -> None:
        retained = self._retained[item]
        retained.since = self._moment.now
        retained.expires_at = None if retained.duration is None else retained.since + retained.duration
        self._push_expiry(item)
        self.offer(item)

    def _push_expiry(self, item: RankedT) -> None:
        expires_at = self._retained[item].expires_at
        if expires_at is not None:
            self._pushed += 1
            heapq.heappush(self._expiring, (expires_at, self._pushed, item))

    def split(self, upper: RankedT, lower: RankedT) -> None:
        if lower in self._retained:  # else `add` splits a new edge
            self._retained[upper] = replace(self._retained[lower])
            self._push_expiry(upper)

    def removed(self, item: RankedT) -> None:
        del self._retained[item]

    def lowest(self) -> tuple[Key, RankedT] | None:
        self._expire()
        return super().lowest()

    def _expire(self) -> None:
        """Give expired entries the default priority; restart the duration of those in use."""
        while self._expiring and self._expiring[0][0] <= self._moment.now:
            expires_at, _, item = heapq.heappop(self._expiring)
            retained = self._retained.get(item)
            if retained is None or retained.expires_at != expires_at:
                continue
            if item.locks:
                self._restart(item)
                continue
            retained.priority, retained.duration, retained.expires_at = DEFAULT_PRIORITY, None, None
            if self._refreshes:
                retained.since = expires_at
            self.offer(item)

    def _by_priority(self, item: RankedT) -> Key:
        retained = self._retained[item]
        return retained.priority, retained.since, item.used, item.serial

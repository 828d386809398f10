"""Eviction by declared times and classes: pins, retention and priority."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from spanlab.core.eviction.orders import (
    EVICTION_ORDERS,
    FUTURE,
    REQUESTS,
    EvictionFacts,
    EvictionOrder,
    Kind,
    PinRules,
    RankedHeap,
    RankedT,
)
from spanlab.core.request import Moment
from spanlab.core.tree import Key, Node, State
from spanlab.model_spec import COST
from spanlab.registry import Bounds, not_negative, one_of, positive

# ------------------------------------------------------------------------------
# Pins with a time to live on top of any other order: recently used entries stay locked for some
# time.
#
# `ttl_pins`: Continuum, arXiv 2511.02230, pins the KV of a request that ends in a call of a tool,
# until the call has
# returned or a time to live is over. Here the time is an option; there it is chosen from the
# history of each tool.
# `lease`: Mooncake's store leases the entries that a request reads, by default for 10 seconds.
# ------------------------------------------------------------------------------

NS = 1e9
PinSeconds = Annotated[float, positive, "longest time of a pin, seconds"]
PinnedOrder = Annotated[str, "the order of entries without a pin"]
OrderOptions = Annotated[dict[str, Any] | None, "options of that order, by name"]


@EVICTION_ORDERS.register("ttl_pins", needs=(REQUESTS, COST))
def ttl_pins(
    facts: EvictionFacts,
    seconds: PinSeconds = 10.0,
    order: PinnedOrder = "lru",
    order_options: OrderOptions = None,
) -> EvictionOrder:
    """The order `order`; a request with a successor is pinned from its end until the successor, at
    most `seconds`."""
    return _pinned(
        facts,
        PinRules(round(seconds * NS), "end", facts.rules.continued),
        order,
        order_options or {},
    )


@EVICTION_ORDERS.register("lease", needs=(REQUESTS, COST))
def lease(
    facts: EvictionFacts,
    seconds: PinSeconds = 10.0,
    order: PinnedOrder = "lru",
    order_options: OrderOptions = None,
) -> EvictionOrder:
    """The order `order`; the entries that a request reads are pinned from its admission, for
    `seconds`."""
    return _pinned(
        facts, PinRules(round(seconds * NS), "read", frozenset()), order, order_options or {}
    )


def _pinned(
    facts: EvictionFacts, pins: PinRules, order: str, options: dict[str, Any]
) -> EvictionOrder:
    pinning = ("ttl_pins", "lease", *EVICTION_ORDERS.needing(FUTURE))
    one_of(
        "eviction_options.order", order, [name for name in EVICTION_ORDERS if name not in pinning]
    )
    EVICTION_ORDERS.check(
        "eviction_options.order_options", order, f"eviction_options.order={order}", options
    )
    return replace(EVICTION_ORDERS.make(order, {}, options, facts=facts), pins=pins)


# ------------------------------------------------------------------------------
# Retention of tokens by priority and duration, as in TensorRT-LLM's retention configuration.
# ------------------------------------------------------------------------------

DEFAULT_PRIORITY = 35
a_priority = Bounds("a number from 1 to 100", lambda value: 1 <= value <= 100)


@dataclass(frozen=True)
class Retention:
    """Retention of tokens `[start, stop)`; `stop` None is the end of the prompt.

    `priority`  from 1, which is evicted first, to 100
    `seconds`   how long the priority holds; None: without an end
    """

    start: int = 0
    stop: int | None = None
    priority: int = DEFAULT_PRIORITY
    seconds: float | None = None

    def check(self, path: str) -> None:
        """Raise ValueError for invalid values; `path` is the key of these settings."""
        not_negative(f"{path}.start", self.start)
        if self.stop is not None and self.stop <= self.start:
            raise ValueError(
                f"{path}.stop={self.stop}: expected a position behind start={self.start}, or null"
            )
        a_priority(f"{path}.priority", self.priority)
        positive(f"{path}.seconds", self.seconds)

    @property
    def duration_ns(self) -> int | None:
        """Duration in nanoseconds; None: without an end, as always for the default priority."""
        return (
            None
            if self.seconds is None or self.priority == DEFAULT_PRIORITY
            else round(self.seconds * 1e9)
        )


def parse_ranges(path: str, settings: Sequence[dict[str, Any]]) -> list[Retention]:
    """Parse ranges: objects of start, stop, priority and seconds, in order and without overlap."""
    ranges: list[Retention] = []
    for index, setting in enumerate(settings):
        key = f"{path}[{index}]"
        try:
            ranges.append(Retention(**setting))
        except TypeError as error:
            raise ValueError(
                f"{key}={setting}: expected an object of start, stop, priority and seconds"
            ) from error
        ranges[-1].check(key)
        if index and (ranges[-2].stop or ranges[-1].start + 1) > ranges[-1].start:
            raise ValueError(
                f"{key}.start={ranges[-1].start}: expected the end of the range before, or more"
            )
    return ranges


class RetentionRules:
    """Retention that the current request sets for the blocks of its path: that of each block's
    first token."""

    def __init__(
        self, ranges: Sequence[Retention], output: Retention, block_size: int, moment: Moment
    ) -> None:
        self._ranges = ranges
        self._output = output
        self._block_size = block_size
        self._moment = moment
        self._starts = [retention.start for retention in ranges]
        bounds = {
            bound for retention in ranges for bound in (retention.start, retention.stop) if bound
        }
        self._changes = {self._block_from(bound) for bound in bounds}

    def at_block(self, start: int) -> Retention | None:
        """The retention of the block that starts at a position; None where the request sets
        none."""
        if start >= self._output_start:
            return self._output
        index = bisect_right(self._starts, start) - 1
        if index < 0:
            return None
        stop = self._ranges[index].stop
        return self._ranges[index] if stop is None or start < stop else None

    def split_depths(self, start: int, stop: int) -> list[int]:
        """Depths within a new edge `[start, stop)` at which the retention changes, increasing."""
        return sorted(
            depth for depth in self._changes | {self._output_start} if start < depth < stop
        )

    @property
    def _output_start(self) -> int:
        """The start of the first block of output tokens."""
        assert self._moment.request is not None, "entries are stored and used for a request"
        return self._block_from(self._moment.request.num_tokens)

    def _block_from(self, position: int) -> int:
        """The start of the first block that has no token before a position."""
        return -(-position // self._block_size) * self._block_size


# ------------------------------------------------------------------------------
# Eviction by priority, optionally with a duration: lowest priority first, then least recently
# used.
#
# The rules are those of TensorRT-LLM's block retention. A use sets an entry's priority and
# duration to those of its request. If the request sets none, the entry keeps its priority and
# loses its duration. A duration restarts when a use ends. An expired entry has the default
# priority, 35. Mooncake's soft pin is a high priority with a duration, and an expired entry
# keeps its age (`expired=by_use`).
# ------------------------------------------------------------------------------

EXPIRED = ("newest", "by_use")


@EVICTION_ORDERS.register("priority", needs=(REQUESTS,))
def priority(
    facts: EvictionFacts,
    ranges: Annotated[
        list[dict[str, Any]] | None,
        "objects of start, stop, priority and seconds: positions of the prompt",
    ] = None,
    decode: Annotated[int, a_priority, "priority of the output"] = DEFAULT_PRIORITY,
    decode_seconds: Annotated[
        float | None, positive, "how long it holds, seconds; null: without an end"
    ] = None,
    expired: Annotated[
        str, EXPIRED, "whether an expired entry is as new, or keeps its age"
    ] = "newest",
) -> EvictionOrder:
    """The lowest priority first, then the least recently used; an expired entry is as new, or keeps
    its age."""
    output = Retention(0, None, decode, decode_seconds)
    size = facts.tree.block_size
    retention = RetentionRules(
        parse_ranges("eviction_options.ranges", ranges or []), output, size, facts.moment
    )

    def split(node: Node) -> list[Node]:
        """Split a new edge into nodes with one retention each."""
        return [
            *[
                facts.tree.split(node, depth)
                for depth in retention.split_depths(node.start, node.depth)
            ],
            node,
        ]

    def of_state(state: State) -> Retention | None:
        return retention.at_block((state.position - 1) // size * size)

    refreshes, moment = expired == "newest", facts.moment
    leaves = PriorityCandidates(
        facts.leaves, lambda node: retention.at_block(node.start), split, refreshes, moment
    )
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
        self._retention_of = retention_of
        self._split_new = split
        self._refreshes = refreshes
        self._moment = moment
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
        retained.expires_at = (
            None if retained.duration is None else retained.since + retained.duration
        )
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
        # give expired entries the default priority; restart the duration of those in use
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
        return super().lowest()

    def _by_priority(self, item: RankedT) -> Key:
        retained = self._retained[item]
        return retained.priority, retained.since, item.used, item.serial

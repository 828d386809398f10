"""Routers by name: which of several replicas serves a request, decided when it arrives.

A router reads the present state of its `replicas`, and nothing of the future: no output lengths, no
step times. Among replicas of equal rank, the first in number is taken.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import cycle
from typing import Protocol

import numpy as np

from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request, Span
from spanlab.core.scheduler import Scheduler
from spanlab.core.step import ScheduledSequence, ScheduledStep, StepResult
from spanlab.core.tree import LAYOUTS, Node
from spanlab.kinds import Kinds, check_fields, field
from spanlab.registry import not_negative, positive, share


class Target(Protocol):
    """The properties of a replica that a router may read."""

    @property
    def requests(self) -> int:
        """Number of requests sent to it that have not finished."""
        ...

    @property
    def tokens(self) -> int:
        """Prompt tokens of these requests."""
        ...

    def cached(self, request: Request, now: int) -> int:
        """Return the prompt tokens of a request that it would reuse now."""
        ...


# Here and not beside `Replica`, whose file is compiled: Python code cannot extend compiled classes.
class Observer(Protocol):
    """What happens in replicas, which it knows by their numbers; by default, nothing is noted."""

    def arrived(self, request: Request, now: int) -> Request:
        """Return the request that is served in the place of one that is sent to a replica now."""
        return request

    def changing(self, replica: int, now: int) -> None:
        """The content of a replica's store may change next."""
        return

    def ran(self, step: ScheduledStep, now: int, result: StepResult) -> None:
        """A step began at `now` and has this result; the scheduler has not advanced yet."""
        return

    def stored(self, step: ScheduledStep) -> None:
        """The policy has stored the tokens of a step."""
        return

    def finished(self, replica: int, sequence: ScheduledSequence) -> None:
        """A sequence has finished."""
        return


class WatchedTarget(Target, Protocol):
    """A replica whose store a router may watch."""

    scheduler: Scheduler
    observers: list[Observer]

    @property
    def now(self) -> int:
        """Nanoseconds on the clock of the run."""
        ...


#: From a request and the time in nanoseconds, the number of the replica that serves it.
Route = Callable[[Request, int], int]


@dataclass
class Replicas:
    """Replicas behind one router, each with its own store; simulator only."""

    count: int = field(1, positive, "number of replicas")
    routing: str | None = field(None, None, "the router; null: a single replica")

    def __post_init__(self) -> None:
        check_fields(self, "replicas")
        if self.routing is None and self.count > 1:
            expected = f"expected one of {', '.join(ROUTERS)}"
            raise ValueError(f"replicas.count={self.count} with replicas.routing=null: {expected}")

    def route(self, replicas: Sequence[WatchedTarget], rng: np.random.Generator) -> Route:
        """Return the router of a run; `rng` is for one that draws."""
        return lambda request, now: 0


ROUTERS: Kinds[Replicas] = Kinds("replicas", Replicas, key="routing")


@dataclass
@ROUTERS.register("prefix_events")
class PrefixEvents(Replicas):
    """The replica with the longest prefix of the prompt, as far as messages tell; among equals the
    least loaded one."""

    events_delay_s: float | None = field(
        None,
        not_negative,
        "delay of cache events (stored, evicted) to the router, seconds; null: 0",
    )
    events_lost: float | None = field(
        None, share, "share of the cache events that are lost; null: 0"
    )

    def route(self, replicas: Sequence[WatchedTarget], rng: np.random.Generator) -> Route:
        delay_ns, lost = round((self.events_delay_s or 0.0) * 1e9), self.events_lost or 0.0
        channels = [EventChannel(delay_ns, lost, each) for each in rng.spawn(len(replicas))]
        for replica, channel in zip(replicas, channels, strict=True):
            BlockEvents(replica, channel)
        return lambda request, now: longest(
            replicas, [channel.prefix_tokens(request, now) for channel in channels]
        )


@dataclass
@ROUTERS.register("round_robin")
class RoundRobin(Replicas):
    """One replica after another."""

    def route(self, replicas: Sequence[Target], rng: np.random.Generator) -> Route:
        numbers = cycle(range(len(replicas)))
        return lambda request, now: next(numbers)


@dataclass
@ROUTERS.register("random")
class AtRandom(Replicas):
    """Any replica, all alike."""

    def route(self, replicas: Sequence[Target], rng: np.random.Generator) -> Route:
        return lambda request, now: int(rng.integers(len(replicas)))


@dataclass
@ROUTERS.register("least_loaded")
class LeastLoaded(Replicas):
    """The replica with the fewest requests; among equals that with the fewest prompt tokens."""

    def route(self, replicas: Sequence[Target], rng: np.random.Generator) -> Route:
        return lambda request, now: lightest(replicas, range(len(replicas)))


@dataclass
@ROUTERS.register("prefix_aware")
class PrefixAware(Replicas):
    """The replica that would reuse most of the prompt; among equals the least loaded one."""

    def route(self, replicas: Sequence[Target], rng: np.random.Generator) -> Route:
        return lambda request, now: longest(
            replicas, [replica.cached(request, now) for replica in replicas]
        )


@dataclass
@ROUTERS.register("session_sticky")
class SessionSticky(Replicas):
    """The replica that served the session's first request, which goes to the least loaded one."""

    def route(self, replicas: Sequence[Target], rng: np.random.Generator) -> Route:
        replica_of: dict[int, int] = {}

        def route(request: Request, now: int) -> int:
            if request.group_id not in replica_of:
                replica_of[request.group_id] = lightest(replicas, range(len(replicas)))
            return replica_of[request.group_id]

        return route


@dataclass
@ROUTERS.register("weighted")
class Weighted(Replicas):
    """The highest `cache_weight` × cached share of the prompt − `load_weight` × load.

    The load is the replica's requests ÷ those of the fullest one, so that both terms lie from 0 to
    1, as those of the weighted scorers in llm-d's scheduler do; SGLang's and Dynamo's routers weigh
    the same two against each other.
    """

    cache_weight: float | None = field(
        None, not_negative, "weight of the cached share of a prompt; null: 1"
    )
    load_weight: float | None = field(
        None, not_negative, "weight of a replica's share of the highest number of requests; null: 1"
    )

    def route(self, replicas: Sequence[Target], rng: np.random.Generator) -> Route:
        cache_weight = 1.0 if self.cache_weight is None else self.cache_weight
        load_weight = 1.0 if self.load_weight is None else self.load_weight

        def route(request: Request, now: int) -> int:
            requests = [replica.requests for replica in replicas]
            fullest, prompt = max(1, *requests), request.num_tokens
            scores = [
                cache_weight * (replica.cached(request, now) / prompt)
                - load_weight * count / fullest
                for replica, count in zip(replicas, requests, strict=True)
            ]
            return lightest(
                replicas, [number for number, score in enumerate(scores) if score == max(scores)]
            )

        return route


def lightest(replicas: Sequence[Target], among: Sequence[int]) -> int:
    """Return the replica with the fewest requests, then prompt tokens, then the lowest number."""
    return min(
        among, key=lambda number: (replicas[number].requests, replicas[number].tokens, number)
    )


def longest(replicas: Sequence[Target], cached: Sequence[int]) -> int:
    """Return the replica that has most of a prompt; among equals the least loaded one."""
    most = max(cached)
    return lightest(replicas, [number for number, tokens in enumerate(cached) if tokens == most])


# ------------------------------------------------------------------------------
# A router that learns the contents of caches from messages, which may arrive late or never.
#
# Every replica sends a message for each block that it stores, when a prompt is computed or
# an output has finished, and for each block that it evicts. Engines that publish KV events
# do the same, for routers that index blocks by their chained hashes.
# ------------------------------------------------------------------------------

Digests = list[bytes]


@dataclass
class EventChannel:
    """The messages of one replica in flight, and the blocks that arrived messages report as
    stored."""

    delay_ns: int
    lost: float
    rng: np.random.Generator
    block_size: int = 1
    _in_flight: deque[tuple[int, bytes, bool]] = dataclasses.field(default_factory=deque)
    _stored: set[bytes] = dataclasses.field(default_factory=set)

    def send(self, now: int, blocks: Digests, stored: bool) -> None:
        """Send a message for each block."""
        arrives = self.rng.random(len(blocks)) >= self.lost
        arrival_ns = now + self.delay_ns
        self._in_flight.extend(
            (arrival_ns, block, stored)
            for block, arrived in zip(blocks, arrives.tolist(), strict=True)
            if arrived
        )

    def prefix_tokens(self, request: Request, now: int) -> int:
        """Return the tokens of the longest prefix of a prompt whose blocks are reported as
        stored."""
        while self._in_flight and self._in_flight[0][0] <= now:
            _, block, stored = self._in_flight.popleft()
            (self._stored.add if stored else self._stored.discard)(block)
        blocks = digests(request, self.block_size)
        first = next(
            (index for index, block in enumerate(blocks) if block not in self._stored), len(blocks)
        )
        return first * self.block_size


def digests(request: Request, block_size: int) -> Digests:
    """Return a hash for each full block of the prompt, of all tokens up to its end and of the
    tenant."""
    ids = request.tokens
    tokens, width = ids.tobytes(), block_size * ids.itemsize
    digest, hashes = request.cache_salt.encode(), []
    for start in range(0, len(tokens) - width + 1, width):
        digest = blake2b(digest + tokens[start : start + width], digest_size=16).digest()
        hashes.append(digest)
    return hashes


class BlockEvents(Observer):
    """Follows the tree of a replica's policy, and sends messages about stored and evicted
    blocks."""

    def __init__(self, replica: WatchedTarget, channel: EventChannel) -> None:
        policy = replica.scheduler.policy
        if not isinstance(policy, TreePolicy) or policy.rules.layout is not LAYOUTS["whole"]:
            raise ValueError(
                "replicas.routing=prefix_events: expected arms that keep prefixes in a tree"
            )
        self._policy, self._replica, self._channel = policy, replica, channel
        self._blocks: dict[Node, Digests] = {}
        channel.block_size = policy.store.tree.block_size
        policy.store.tree.watchers.append(self)
        replica.observers.append(self)

    def stored(self, step: ScheduledStep) -> None:
        """Send messages about what a step has stored: complete prompts, and finished outputs."""
        for chunk in step.chunks:
            if chunk.last:
                self._send_stored(chunk.sequence.request)
        for sequence in (*(chunk.sequence for chunk in step.chunks), *step.decodes):
            if sequence.finished_at >= 0 and sequence.request.output is not None:
                # the output that was computed stands behind the prompt
                request = sequence.request
                output = sequence.request.output[: sequence.generated - 1]
                self._send_stored(replace(request, spans=(*request.spans, Span(output))))

    def _send_stored(self, request: Request) -> None:
        (cache_span,) = self._policy.layout(request)
        node, matched = self._policy.index.find(request, cache_span)
        size, blocks = self._channel.block_size, digests(request, self._channel.block_size)
        for ancestor in reversed(list(node.path())):
            if ancestor not in self._blocks and ancestor.depth <= matched:
                self._blocks[ancestor] = blocks[ancestor.start // size : ancestor.depth // size]
                self._channel.send(self._replica.now, self._blocks[ancestor], stored=True)

    # -- changes of the tree -----------------------------------------------------------------------

    def split(self, upper: Node, lower: Node) -> None:
        """Split the blocks of a node like its tokens."""
        if lower in self._blocks:
            blocks = self._blocks[lower]
            cut = (upper.depth - upper.start) // self._channel.block_size
            self._blocks[upper], self._blocks[lower] = blocks[:cut], blocks[cut:]

    def removed(self, node: Node) -> None:
        """Send messages about evicted blocks."""
        self._channel.send(self._replica.now, self._blocks.pop(node, []), stored=False)

"""A router that learns the contents of caches from messages, which may arrive late or never.

Every replica sends a message for each block that it stores, when a prompt is computed or an output has finished,
and for each block that it evicts. Engines that publish KV events do the same, for routers that index blocks by
their chained hashes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np

from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request, Span
from spanlab.core.step import ScheduledSequence as Served
from spanlab.core.step import ScheduledStep
from spanlab.core.tree import LAYOUTS, Node
from spanlab_sim.routing import ROUTERS, Observer, Route, longest
from spanlab_sim.server import Replica

Digests = list[bytes]


@ROUTERS.register("prefix_events")
def prefix_events(
    replicas: Sequence[Replica], rng: np.random.Generator, events_delay_s: float = 0.0, events_lost: float = 0.0
) -> Route:
    """The replica with the longest prefix of the prompt, as far as messages tell; among equals the least loaded one.

    `events_delay_s`  seconds until a message arrives
    `events_lost`     share of the messages that never arrive
    """
    channels = [EventChannel(round(events_delay_s * 1e9), events_lost, each) for each in rng.spawn(len(replicas))]
    for replica, channel in zip(replicas, channels, strict=True):
        BlockEvents(replica, channel)

    def route(request: Request, now: int) -> int:
        return longest(replicas, [channel.prefix_tokens(request, now) for channel in channels])

    return route


@dataclass
class EventChannel:
    """The messages of one replica in flight, and the blocks that arrived messages report as stored."""

    delay_ns: int
    lost: float
    rng: np.random.Generator
    block_size: int = 1
    _in_flight: deque[tuple[int, bytes, bool]] = field(default_factory=deque)
    _stored: set[bytes] = field(default_factory=set)

    def send(self, now: int, blocks: Digests, stored: bool) -> None:
        """Send a message for each block."""
        arrives = self.rng.random(len(blocks)) >= self.lost
        arrival_ns = now + self.delay_ns
        self._in_flight.extend(
            (arrival_ns, block, stored) for block, arrived in zip(blocks, arrives.tolist(), strict=True) if arrived
        )

    def prefix_tokens(self, request: Request, now: int) -> int:
        """Return the tokens of the longest prefix of a prompt whose blocks are reported as stored."""
        while self._in_flight and self._in_flight[0][0] <= now:
            _, block, stored = self._in_flight.popleft()
            (self._stored.add if stored else self._stored.discard)(block)
        blocks = digests(request, self.block_size)
        first = next((index for index, block in enumerate(blocks) if block not in self._stored), len(blocks))
        return first * self.block_size


def digests(request: Request, block_size: int) -> Digests:
    """Return a hash for each full block of the prompt, of all tokens up to its end and of the tenant."""
    ids = request.tokens
    tokens, width = ids.tobytes(), block_size * ids.itemsize
    digest, hashes = request.cache_salt.encode(), []
    for start in range(0, len(tokens) - width + 1, width):
        digest = blake2b(digest + tokens[start : start + width], digest_size=16).digest()
        hashes.append(digest)
    return hashes


class BlockEvents(Observer):
    """Follows the tree of a replica's policy, and sends messages about stored and evicted blocks."""

    def __init__(self, replica: Replica, channel: EventChannel) -> None:
        policy = replica.scheduler.policy
        if not isinstance(policy, TreePolicy) or policy.rules.layout is not LAYOUTS["whole"]:
            raise ValueError("replicas.routing=prefix_events: expected arms that keep prefixes in a tree")
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
                self._send_stored(_with_output(sequence))

    def _send_stored(self, request: Request) -> None:
        (cache_span,) = self._policy.layout(request)
        node, matched = self._policy.index.find(request, cache_span)
        size, blocks = self._channel.block_size, digests(request, self._channel.block_size)
        for ancestor in reversed(list(node.path())):
            if ancestor not in self._blocks and ancestor.depth <= matched:
                self._blocks[ancestor] = blocks[ancestor.start // size : ancestor.depth // size]
                self._channel.send(self._replica.now, self._blocks[ancestor], stored=True)

    # -- changes of the tree ------------------------------------------------------------------------------------------

    def split(self, upper: Node, lower: Node) -> None:
        """Split the blocks of a node like its tokens."""
        if lower in self._blocks:
            blocks, cut = self._blocks[lower], (upper.depth - upper.start) // self._channel.block_size
            self._blocks[upper], self._blocks[lower] = blocks[:cut], blocks[cut:]

    def removed(self, node: Node) -> None:
        """Send messages about evicted blocks."""
        self._channel.send(self._replica.now, self._blocks.pop(node, []), stored=False)


def _with_output(sequence: Served) -> Request:
    """Return the request with the output that was computed behind its prompt."""
    request = sequence.request
    assert request.output is not None, "called only with a known output"
    return replace(request, spans=(*request.spans, Span(request.output[: sequence.generated - 1])))

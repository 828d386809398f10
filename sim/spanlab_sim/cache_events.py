"""A router that hears of what caches hold by messages, which come late or never; it does not ask the caches.

Every replica tells which blocks it has stored, when a prompt is computed or an output has ended, and which it has
evicted. So do engines that publish KV events, to routers that keep an index of blocks by their chained hashes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np

from spanlab.core.cache_spans import LAYOUTS
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request, Span
from spanlab.core.scheduled import ScheduledStep
from spanlab.core.scheduled import Sequence as Served
from spanlab.core.tree import Node
from spanlab_sim.replica import Replica
from spanlab_sim.routing import ROUTERS, Route, longest

Digests = list[bytes]


@ROUTERS.register("prefix_events")
def prefix_events(
    replicas: Sequence[Replica], rng: np.random.Generator, events_delay_s: float = 0.0, events_lost: float = 0.0
) -> Route:
    """The replica with the longest prefix of the prompt, as far as messages tell; among equals the least loaded one.

    `events_delay_s`  seconds until a message arrives
    `events_lost`     share of the messages that never arrive
    """
    line = [Line(round(events_delay_s * 1e9), events_lost, own) for own in rng.spawn(len(replicas))]
    for replica, own in zip(replicas, line, strict=True):
        StoredBlocks(replica, own)

    def route(request: Request, now: int) -> int:
        return longest(replicas, [own.known(request, now) for own in line])

    return route


@dataclass
class Line:
    """Messages of one replica on their way, and the blocks that those that have arrived leave known."""

    delay_ns: int
    lost: float
    rng: np.random.Generator
    block_size: int = 1
    _under_way: deque[tuple[int, bytes, bool]] = field(default_factory=deque)
    _known: set[bytes] = field(default_factory=set)

    def tell(self, now: int, blocks: Digests, stored: bool) -> None:
        """Send a message for each block."""
        heard = self.rng.random(len(blocks)) >= self.lost
        at = now + self.delay_ns
        self._under_way.extend((at, block, stored) for block, kept in zip(blocks, heard.tolist(), strict=True) if kept)

    def known(self, request: Request, now: int) -> int:
        """Tokens of the longest prefix of a prompt whose blocks are known."""
        while self._under_way and self._under_way[0][0] <= now:
            _, block, stored = self._under_way.popleft()
            (self._known.add if stored else self._known.discard)(block)
        blocks = digests(request, self.block_size)
        first = next((at for at, block in enumerate(blocks) if block not in self._known), len(blocks))
        return first * self.block_size


def digests(request: Request, block_size: int) -> Digests:
    """The prompt's full blocks, each by a hash of all tokens up to its end and of the tenant."""
    ids = request.tokens
    tokens, width = ids.tobytes(), block_size * ids.itemsize
    digest, found = request.cache_salt.encode(), []
    for at in range(0, len(tokens) - width + 1, width):
        digest = blake2b(digest + tokens[at : at + width], digest_size=16).digest()
        found.append(digest)
    return found


class StoredBlocks:
    """Follows the tree of a replica's policy, and tells what enters and leaves it."""

    def __init__(self, replica: Replica, line: Line) -> None:
        policy = replica.scheduler.policy
        if not isinstance(policy, TreePolicy) or policy.rules.layout is not LAYOUTS["whole"]:
            raise ValueError("replicas.routing=prefix_events: expected arms that keep prefixes in a tree")
        self._policy, self._replica, self._line = policy, replica, line
        self._blocks: dict[Node, Digests] = {}
        line.block_size = policy.store.tree.block_size
        policy.store.tree.watchers.append(self)
        replica.on_stored = self.stored

    def stored(self, step: ScheduledStep) -> None:
        """Tell what a step has stored: prompts that are complete, and outputs that have ended."""
        for chunk in step.chunks:
            if chunk.last:
                self._enter(chunk.sequence.request)
        for sequence in (*(chunk.sequence for chunk in step.chunks), *step.decodes):
            if sequence.finished_at >= 0 and sequence.request.output is not None:
                self._enter(_with_output(sequence))

    def _enter(self, request: Request) -> None:
        (whole,) = self._policy.layout(request)
        node, matched = self._policy.index.find(request, whole)
        size, blocks = self._line.block_size, digests(request, self._line.block_size)
        for part in reversed(list(node.path())):
            if part not in self._blocks and part.depth <= matched:
                self._blocks[part] = blocks[part.start // size : part.depth // size]
                self._line.tell(self._replica.now, self._blocks[part], stored=True)

    # -- what the tree tells ------------------------------------------------------------------------------------------

    def split(self, upper: Node, lower: Node) -> None:
        """Blocks go with their tokens."""
        if lower in self._blocks:
            blocks, cut = self._blocks[lower], (upper.depth - upper.start) // self._line.block_size
            self._blocks[upper], self._blocks[lower] = blocks[:cut], blocks[cut:]

    def removed(self, node: Node) -> None:
        """Tell what has been evicted."""
        self._line.tell(self._replica.now, self._blocks.pop(node, []), stored=False)


def _with_output(sequence: Served) -> Request:
    """The request with what was generated and computed behind its prompt."""
    request = sequence.request
    assert request.output is not None, "called where it is known"
    return replace(request, spans=(*request.spans, Span(request.output[: sequence.generated - 1])))

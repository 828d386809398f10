"""Reuse of an LRU cache at every size in one pass: stack distances of nodes of several blocks.

Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9 (1970): a cache of C blocks holds
the C most recently used blocks, so a block is resident if fewer than C others were used since. A request uses its
blocks from the last to the first, as engines free them, so that a prompt's end is evicted before its start. The blocks
of one node are always used together, and are counted with a Fenwick tree over the order of use.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanlab.offline.forest import Ints
from spanlab.offline.paths import Paths
from spanlab.offline.reuses import Floats

_UNLIMITED = 1 << 62  # blocks of a cache without limit


@dataclass(frozen=True)
class Distances:
    """Stack distances by visit.

    `above`   blocks used since the last use of the visit's node; infinite at the first visit
    `blocks`  blocks of the node
    """

    above: Floats
    blocks: Ints

    def resident_blocks(self, capacity: float) -> Ints:
        """Return the blocks of each visit, the first ones of its node, in a cache of `capacity` blocks."""
        available = min(capacity, _UNLIMITED) - self.above
        return np.clip(available, 0, self.blocks).astype(np.int64)

    @property
    def largest(self) -> int:
        """Blocks of the smallest cache that reuses as much as an unlimited one."""
        finite = np.isfinite(self.above)
        return int((self.above[finite] + self.blocks[finite]).max(initial=0))


def stack_distances(paths: Paths, blocks: Ints, private: Ints) -> Distances:
    """Return the distances of every visit.

    `blocks`   blocks of each node, shape (nodes,)
    `private`  blocks of each request that are never reused: a partly filled one, and those of its output
    """
    weights, nodes, starts = blocks.tolist(), paths.nodes.tolist(), paths.starts.tolist()
    slots = len(nodes) + paths.requests
    order, above = _Order(slots), np.full(len(nodes), np.inf)
    for request, num_private in enumerate(private.tolist()):
        first, stop = starts[request], starts[request + 1]
        path = nodes[first:stop]
        for index, distance in enumerate(order.distances(path, weights)):
            above[first + index] = distance
        order.use(num_private)
        for node in reversed(path):
            order.move(node, weights[node])
    return Distances(above, blocks[paths.nodes])


class _Order:
    """Nodes by their last use, with the blocks of each as a Fenwick tree over uses."""

    def __init__(self, slots: int) -> None:
        self._sums, self._slots, self._next = [0] * (slots + 1), slots, 1
        self._slot: dict[int, int] = {}
        self._total = 0

    def distances(self, path: list[int], weights: list[int]) -> list[int]:
        """Return the blocks used since the last use of each node of a path, up to the first unused node."""
        distances: list[int] = []
        before = -1
        for index, node in enumerate(path):
            slot = self._slot.get(node)
            if slot is None:
                break
            adjacent = slot == before - 1  # used by the same request, just before the node above it
            distances.append(distances[-1] + weights[path[index - 1]] if adjacent else self._total - self._sum_to(slot))
            before = slot
        return distances

    def move(self, node: int, weight: int) -> None:
        """Make a node the most recently used one."""
        slot = self._slot.get(node)
        if slot is not None:
            self._add(slot, -weight)
        self._slot[node] = self._next
        self.use(weight)

    def use(self, weight: int) -> None:
        """Append a use of `weight` blocks to the order."""
        if weight:
            self._add(self._next, weight)
        self._next += 1

    def _add(self, slot: int, weight: int) -> None:
        sums, slots = self._sums, self._slots
        self._total += weight
        while slot <= slots:
            sums[slot] += weight
            slot += slot & -slot

    def _sum_to(self, slot: int) -> int:
        sums, total = self._sums, 0
        while slot:
            total += sums[slot]
            slot -= slot & -slot
        return total

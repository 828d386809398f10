"""Hit rates of an LRU cache at every size in one pass: stack distances of nodes that weigh several blocks.

Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9 (1970): a cache of C blocks holds
the C blocks that were used last, so a block is found where fewer than C others were used since. A request uses its
blocks from the last to the first, as engines free them, so that a prompt's end leaves before its start. The blocks of
one node are always used together, and are counted with a Fenwick tree over the order of use.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spanlab.offline.forest import Ints
from spanlab.offline.paths import Paths

Floats = NDArray[np.float64]
_MOST = 1 << 62  # blocks of a cache without limit


@dataclass(frozen=True)
class Distances:
    """For each visit: blocks used since its node was, infinite at the first one, and the node's own blocks."""

    above: Floats
    blocks: Ints

    def found(self, capacity: float) -> Ints:
        """Blocks of each visit that a cache of so many blocks holds: the first ones of the node."""
        left = min(capacity, _MOST) - self.above
        return np.clip(left, 0, self.blocks).astype(np.int64)

    @property
    def largest(self) -> int:
        """Blocks with which a cache finds all that can be found."""
        known = np.isfinite(self.above)
        return int((self.above[known] + self.blocks[known]).max(initial=0))


def stack_distances(paths: Paths, blocks: Ints, private: Ints) -> Distances:
    """Distances of every visit.

    `blocks`   of each node, shape (nodes,)
    `private`  blocks of each request that nobody finds again: a partly filled one, and its output's
    """
    weights, nodes, starts = blocks.tolist(), paths.nodes.tolist(), paths.starts.tolist()
    slots = len(nodes) + paths.requests
    order, above = _Order(slots), np.full(len(nodes), np.inf)
    for request, own in enumerate(private.tolist()):
        first, stop = starts[request], starts[request + 1]
        path = nodes[first:stop]
        for place, distance in enumerate(order.distances(path, weights)):
            above[first + place] = distance
        order.use(own)
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
        """Blocks used since each node of a path was, up to the first node that never was."""
        found: list[int] = []
        before = -1
        for place, node in enumerate(path):
            slot = self._slot.get(node)
            if slot is None:
                break
            together = slot == before - 1  # used by the same request, just before the node above it
            found.append(found[-1] + weights[path[place - 1]] if together else self._total - self._upto(slot))
            before = slot
        return found

    def move(self, node: int, weight: int) -> None:
        """Make a node the last one used."""
        slot = self._slot.get(node)
        if slot is not None:
            self._add(slot, -weight)
        self._slot[node] = self._next
        self.use(weight)

    def use(self, weight: int) -> None:
        """Use blocks that nobody uses again."""
        if weight:
            self._add(self._next, weight)
        self._next += 1

    def _add(self, slot: int, weight: int) -> None:
        sums, slots = self._sums, self._slots
        self._total += weight
        while slot <= slots:
            sums[slot] += weight
            slot += slot & -slot

    def _upto(self, slot: int) -> int:
        sums, total = self._sums, 0
        while slot:
            total += sums[slot]
            slot -= slot & -slot
        return total

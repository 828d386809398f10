"""Groups of layers that share one block pool: attention keeps all blocks, recurrent layers a few states.

A request has one table of blocks per group; entry i is the block of tokens `[i · size, (i + 1) · size)`.
A state block holds the recurrent state at the end of its tokens. Semantics: vLLM 0.32.0, groups
with hashes of whole blocks, and drafts for attention alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from spanlab.core.policies.block_pool import NULL_BLOCK, Block, BlockPool


def blocks_of(tokens: int, size: int) -> int:
    """Return the number of blocks for `tokens` tokens, the last one possibly partly filled."""
    return -(-tokens // size)


@dataclass(slots=True)
class BlockTable:
    """Blocks of one request in one group.

    `num_visited`  leading blocks that were published, or skipped
    `last_state`   index of the state before the last allocation; None without one
    `num_retired`  leading blocks that were freed or are null, permanently
    """

    blocks: list[Block] = field(default_factory=list)
    num_visited: int = 0
    last_state: int | None = None
    num_retired: int = 0


class Boundaries(NamedTuple):
    """Positions at which a later request may resume, and the retention of states between them.

    `retention`  None: the state of every block; 0: states at `positions` only; n: also one per n tokens
    """

    positions: tuple[int, ...]
    retention: int | None


class BlockGroup(Protocol):
    """Lookup, allocation, publication and release of the blocks of one group."""

    index: int

    def find(self, chain: Sequence[int], limit: int) -> list[Block]:
        """Return the blocks of the longest usable prefix of at most `limit` blocks; null where not needed."""
        ...

    def needed(self, table: BlockTable, tokens: int, reused: Sequence[Block]) -> int:
        """Return the free blocks that a request for `tokens` tokens takes if it reuses `reused`."""
        ...

    def attach(self, table: BlockTable, reused: Sequence[Block]) -> None:
        """Add the reused blocks to the table of a new request."""
        ...

    def trim(self, table: BlockTable, computed: int) -> None:
        """Free blocks that no later token of the request reads after `computed` tokens."""
        ...

    def extend(self, table: BlockTable, tokens: int) -> None:
        """Allocate blocks for `tokens` tokens in total."""
        ...

    def publish(self, table: BlockTable, chain: Sequence[int], count: int, boundaries: Boundaries) -> Sequence[int]:
        """Publish the first `count` blocks under digests of `chain`; return the indices of the newly published."""
        ...


@dataclass(slots=True)
class AttentionBlocks:
    """Full attention: every block is read until the request ends."""

    pool: BlockPool
    size: int
    index: int = 0

    def find(self, chain: Sequence[int], limit: int) -> list[Block]:
        return self.pool.find_run(self.index, chain if limit == len(chain) else chain[:limit])

    def needed(self, table: BlockTable, tokens: int, reused: Sequence[Block]) -> int:
        new = blocks_of(tokens, self.size) - len(table.blocks) - len(reused)
        return max(new, 0) + count_unreferenced(reused)

    def attach(self, table: BlockTable, reused: Sequence[Block]) -> None:
        self.pool.use(reused)
        table.blocks = list(reused)
        table.num_visited = len(reused)

    def trim(self, table: BlockTable, computed: int) -> None:
        """Do nothing: every token is read again."""

    def extend(self, table: BlockTable, tokens: int) -> None:
        new = blocks_of(tokens, self.size) - len(table.blocks)
        if new > 0:
            table.blocks += self.pool.take(new)

    def publish(self, table: BlockTable, chain: Sequence[int], count: int, boundaries: Boundaries) -> Sequence[int]:
        start, stop = table.num_visited, max(table.num_visited, count)
        self.pool.publish(self.index, table.blocks[start:stop], chain[start:stop])
        table.num_visited = stop
        return range(start, stop)


@dataclass(slots=True)
class StateBlocks:
    """Recurrent layers: a request needs its last state; a prefix resumes from any stored state.

    Chunks end on block boundaries, and only the state at a chunk's end is written.
    """

    pool: BlockPool
    size: int
    index: int = 1

    def find(self, chain: Sequence[int], limit: int) -> list[Block]:
        for index in reversed(range(min(limit, len(chain)))):
            block = self.pool.find(self.index, chain[index])
            if block is not None:
                return [NULL_BLOCK] * index + [block]
        return []

    def needed(self, table: BlockTable, tokens: int, reused: Sequence[Block]) -> int:
        new = max(blocks_of(tokens, self.size) - len(table.blocks) - len(reused), 0)
        return min(new, 1) + count_unreferenced(reused)

    def attach(self, table: BlockTable, reused: Sequence[Block]) -> None:
        self.pool.use(reused)
        table.blocks = list(reused)
        table.num_visited = len(reused)

    def trim(self, table: BlockTable, computed: int) -> None:
        """Free all states but that of the last computed token."""
        stop = min((computed - 1) // self.size, len(table.blocks))
        freed = list(reversed(range(table.num_retired, stop)))
        table.num_retired = max(table.num_retired, stop)
        last = table.last_state
        if last is not None and stop <= last < blocks_of(computed, self.size) - 1:
            freed.append(last)
        self.pool.free([table.blocks[index] for index in freed])
        for index in freed:
            table.blocks[index] = NULL_BLOCK

    def extend(self, table: BlockTable, tokens: int) -> None:
        needed, allocated = blocks_of(tokens, self.size), len(table.blocks)
        if needed <= allocated:
            return
        table.last_state = allocated - 1 if allocated else None
        table.blocks += [NULL_BLOCK] * (needed - allocated - 1)
        table.blocks += self.pool.take(1)

    def publish(self, table: BlockTable, chain: Sequence[int], count: int, boundaries: Boundaries) -> Sequence[int]:
        published = []
        for index in range(table.num_visited, count):
            if table.blocks[index] is not NULL_BLOCK and self._retains(index, boundaries):
                self.pool.publish(self.index, [table.blocks[index]], [chain[index]])
                published.append(index)
        table.num_visited = max(table.num_visited, count)
        return published

    def _retains(self, index: int, boundaries: Boundaries) -> bool:
        if boundaries.retention is None:
            return True
        if boundaries.retention and (index + 1) % max(boundaries.retention // self.size, 1) == 0:
            return True
        return any(position // self.size == index + 1 for position in boundaries.positions)


def count_unreferenced(reused: Sequence[Block]) -> int:
    """Return the number of blocks without references, which leave the free queue when they are reused."""
    return sum([block.users == 0 for block in reused])

"""Groups of layers that share one block pool: attention keeps every block, recurrence a few states.

A request has one table of blocks per group; entry i stands for tokens `[i · size, (i + 1) · size)`.
A state block holds the recurrent state at the end of its tokens. Semantics: vLLM 0.32.0, groups
with hashes of whole blocks, and drafts for attention alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from spanlab.core.policies.block_pool import NULL_BLOCK, Block, BlockPool


def blocks_of(tokens: int, size: int) -> int:
    """Blocks that hold `tokens` tokens, the last one partly filled."""
    return -(-tokens // size)


@dataclass(slots=True)
class BlockTable:
    """Blocks of one request in one group.

    `looked_at`    leading blocks that were published, or passed over
    `last_state`   index of the state that the last allocation left behind; None where there is none
    `retired`      leading blocks that were freed or are null, for good
    """

    blocks: list[Block] = field(default_factory=list)
    looked_at: int = 0
    last_state: int | None = None
    retired: int = 0


class Boundaries(NamedTuple):
    """Positions at which a later request may resume, and how often states are kept between them.

    `retention`  None: the state of every block; 0: those at `positions` only; n: one per n tokens too
    """

    positions: tuple[int, ...]
    retention: int | None


class BlockGroup(Protocol):
    """How one group finds, allocates, publishes and gives up its blocks."""

    index: int

    def find(self, chain: Sequence[int], limit: int) -> list[Block]:
        """Blocks of the longest usable prefix of at most `limit` blocks; null where not needed."""
        ...

    def needed(self, table: BlockTable, tokens: int, found: Sequence[Block]) -> int:
        """Blocks that leave the queue if a request gets room for `tokens` and uses `found`."""
        ...

    def attach(self, table: BlockTable, found: Sequence[Block]) -> None:
        """Let a new request use what was found."""
        ...

    def trim(self, table: BlockTable, computed: int) -> None:
        """Free what no later token of the request reads, once `computed` tokens have run."""
        ...

    def extend(self, table: BlockTable, tokens: int) -> None:
        """Make room for `tokens` tokens."""
        ...

    def publish(self, table: BlockTable, chain: Sequence[int], count: int, kept: Boundaries) -> Sequence[int]:
        """Make the first `count` blocks findable, under digests of `chain`; returns the indices of the new ones."""
        ...


@dataclass(slots=True)
class AttentionBlocks:
    """Full attention: every block is read until the request ends."""

    pool: BlockPool
    size: int
    index: int = 0

    def find(self, chain: Sequence[int], limit: int) -> list[Block]:
        return self.pool.find_run(self.index, chain if limit == len(chain) else chain[:limit])

    def needed(self, table: BlockTable, tokens: int, found: Sequence[Block]) -> int:
        new = blocks_of(tokens, self.size) - len(table.blocks) - len(found)
        return max(new, 0) + waiting_among(found)

    def attach(self, table: BlockTable, found: Sequence[Block]) -> None:
        self.pool.use(found)
        table.blocks = list(found)
        table.looked_at = len(found)

    def trim(self, table: BlockTable, computed: int) -> None:
        """Keep all: every token is read again."""

    def extend(self, table: BlockTable, tokens: int) -> None:
        new = blocks_of(tokens, self.size) - len(table.blocks)
        if new > 0:
            table.blocks += self.pool.take(new)

    def publish(self, table: BlockTable, chain: Sequence[int], count: int, kept: Boundaries) -> Sequence[int]:
        start, stop = table.looked_at, max(table.looked_at, count)
        self.pool.publish(self.index, table.blocks[start:stop], chain[start:stop])
        table.looked_at = stop
        return range(start, stop)


@dataclass(slots=True)
class StateBlocks:
    """Recurrent layers: a request needs its last state; a prefix resumes from any one stored state.

    Chunks end on block boundaries, and the state at a chunk's end is the only one that is written.
    """

    pool: BlockPool
    size: int
    index: int = 1

    def find(self, chain: Sequence[int], limit: int) -> list[Block]:
        for at in reversed(range(min(limit, len(chain)))):
            block = self.pool.find(self.index, chain[at])
            if block is not None:
                return [NULL_BLOCK] * at + [block]
        return []

    def needed(self, table: BlockTable, tokens: int, found: Sequence[Block]) -> int:
        new = max(blocks_of(tokens, self.size) - len(table.blocks) - len(found), 0)
        return min(new, 1) + waiting_among(found)

    def attach(self, table: BlockTable, found: Sequence[Block]) -> None:
        self.pool.use(found)
        table.blocks = list(found)
        table.looked_at = len(found)

    def trim(self, table: BlockTable, computed: int) -> None:
        """Keep the state of the last computed token alone."""
        stop = min((computed - 1) // self.size, len(table.blocks))
        freed = list(reversed(range(table.retired, stop)))
        table.retired = max(table.retired, stop)
        last = table.last_state
        if last is not None and stop <= last < blocks_of(computed, self.size) - 1:
            freed.append(last)
        self.pool.free([table.blocks[at] for at in freed])
        for at in freed:
            table.blocks[at] = NULL_BLOCK

    def extend(self, table: BlockTable, tokens: int) -> None:
        wanted, held = blocks_of(tokens, self.size), len(table.blocks)
        if wanted <= held:
            return
        table.last_state = held - 1 if held else None
        table.blocks += [NULL_BLOCK] * (wanted - held - 1)
        table.blocks += self.pool.take(1)

    def publish(self, table: BlockTable, chain: Sequence[int], count: int, kept: Boundaries) -> Sequence[int]:
        published = []
        for at in range(table.looked_at, count):
            if table.blocks[at] is not NULL_BLOCK and self._keeps(at, kept):
                self.pool.publish(self.index, [table.blocks[at]], [chain[at]])
                published.append(at)
        table.looked_at = max(table.looked_at, count)
        return published

    def _keeps(self, at: int, kept: Boundaries) -> bool:
        if kept.retention is None:
            return True
        if kept.retention and (at + 1) % max(kept.retention // self.size, 1) == 0:
            return True
        return any(position // self.size == at + 1 for position in kept.positions)


def waiting_among(found: Sequence[Block]) -> int:
    """Blocks without references, which leave the queue when they are used."""
    return sum([block.users == 0 for block in found])

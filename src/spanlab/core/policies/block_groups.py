"""Groups of layers that share one block pool: how far back each reads, and which of its blocks a
prefix needs.

A request has one table of blocks per group; entry i is the block of tokens `[i · size, (i + 1) ·
size)`. Full attention keeps all blocks. A window and a chunk of local attention keep those that the
next token reads. Recurrent layers keep a few states, each at the end of its block's tokens. A ring
is one block of a request that no other request reads. Semantics: vLLM 0.32.0 and 0.33.0, groups
with hashes of whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from spanlab.core.policies.block_pool import (
    EMPTY_PREFIX,
    NULL_BLOCK,
    BlockPool,
    BlockRules,
    BlockTable,
    Digests,
    Prefix,
    Run,
    Source,
    alignment_of,
    blocks_of,
    single_blocks,
    unit_of,
)
from spanlab.core.request import UNLIMITED


class Boundaries(NamedTuple):
    """Positions at which a later request may resume, and the retention of blocks between them.

    `retention`  None: the states and windows of every block; 0: those at `positions` only; n: also
                 once per n tokens
    `tail`       tokens of the prompt in digests, if the block of the last of them gets a key before
                 it is full; else 0
    """

    positions: tuple[int, ...]
    retention: int | None
    tail: int = 0


class BlockGroup(Protocol):
    """Lookup, allocation, publication and release of the blocks of one group."""

    index: int
    size: int

    def find(self, chain: Digests, limit: int) -> Prefix:
        """Return the blocks of the longest usable prefix of at most `limit` tokens; null where not
        needed."""
        ...

    def needed(self, table: BlockTable, tokens: int, reused: Prefix, whole: bool = False) -> int:
        """Return the free blocks that a request for `tokens` tokens takes if it reuses `reused`.

        `whole`  the tokens are those of a whole prompt: a group that frees blocks on the way never
                 holds all of them
        """
        ...

    def attach(self, table: BlockTable, reused: Prefix) -> None:
        """Add the reused blocks to the table of a new request."""
        ...

    def trim(self, table: BlockTable, computed: int) -> None:
        """Free blocks that no later token of the request reads after `computed` tokens."""
        ...

    def release(self, table: BlockTable) -> None:
        """Free all blocks, the last tokens first."""
        ...

    def extend(self, table: BlockTable, tokens: int) -> None:
        """Allocate blocks for `tokens` tokens in total."""
        ...

    def publish(
        self, table: BlockTable, chain: Digests, tokens: int, boundaries: Boundaries, source: Source
    ) -> Sequence[int]:
        """Publish the full blocks of the first `tokens` tokens; return the indices of the newly
        published.

        `source` has these tokens.
        """
        ...

    def room(self, table: BlockTable) -> int:
        """Return the tokens up to which the table certainly does not change."""
        ...

    def held(self, table: BlockTable) -> int:
        """Return the tokens for which the table has blocks."""
        ...


# ------------------------------------------------------------------------------
# Attention over all tokens.
# ------------------------------------------------------------------------------


@dataclass(slots=True)
class AttentionBlocks:
    """Full attention: every block is read until the request ends. A block has `per_block` digests,
    the last is its."""

    pool: BlockPool
    size: int
    index: int = 0
    per_block: int = 1

    def find(self, chain: Digests, limit: int) -> Prefix:
        return self.pool.find_run(self.index, self._digests(chain), 0, limit // self.size)

    def _digests(self, chain: Digests) -> Digests:
        """Return the digests of the group's own blocks."""
        return chain if self.per_block == 1 else chain[self.per_block - 1 :: self.per_block]

    def needed(self, table: BlockTable, tokens: int, reused: Prefix, whole: bool = False) -> int:
        new = blocks_of(tokens, self.size) - table.length - reused.count
        return (new if new > 0 else 0) + (reused.unreferenced() if reused.runs else 0)

    def attach(self, table: BlockTable, reused: Prefix) -> None:
        self.pool.use(reused)
        table.blocks = list(reused.runs)
        table.counts = [len(run) for run in reused.runs]
        table.length = table.num_visited = reused.count

    def trim(self, table: BlockTable, computed: int) -> None:
        """Do nothing: every token is read again."""

    def extend(self, table: BlockTable, tokens: int) -> None:
        new = blocks_of(tokens, self.size) - table.length
        if new > 0:
            self.pool.take(new)
            table.length += new

    def publish(
        self, table: BlockTable, chain: Digests, tokens: int, boundaries: Boundaries, source: Source
    ) -> Sequence[int]:
        start, stop = table.num_visited, max(table.num_visited, tokens // self.size)
        if stop > start:
            self.pool.publish(self.index, table, self._digests(chain), stop, source)
            table.tail = None  # its block is full
        if stop * self.size < boundaries.tail <= tokens:
            table.tail = chain[boundaries.tail * self.per_block // self.size - 1], source
        return range(start, stop)

    def release(self, table: BlockTable) -> None:
        self.pool.evict_owed()  # which may cut the runs that are listed now
        blank, runs = table.length - table.num_visited, table.runs()
        # no lookup finds it, but it waits for its eviction like a full block
        if table.tail is not None:
            blank, last = blank - 1, Run()
            self.pool.publish_single(self.index, last, *table.tail)
            runs.append(last)
        self.pool.release(blank)
        self.pool.free(reversed(runs))

    def room(self, table: BlockTable) -> int:
        return min(self.held(table), (table.num_visited + 1) * self.size - 1)

    def held(self, table: BlockTable) -> int:
        return table.length * self.size


# ------------------------------------------------------------------------------
# Attention over some of the tokens before: a window, or a chunk.
# ------------------------------------------------------------------------------


@dataclass(slots=True)
class SingleBlocks:
    """A group whose blocks are published and freed one by one."""

    pool: BlockPool
    size: int
    index: int

    def extend(self, table: BlockTable, tokens: int) -> None:
        new = blocks_of(tokens, self.size) - len(table.blocks)
        if new > 0:
            table.blocks += self.pool.take_single(new)

    def release(self, table: BlockTable) -> None:
        self.pool.free(reversed(table.blocks))

    def held(self, table: BlockTable) -> int:
        return len(table.blocks) * self.size


@dataclass(slots=True)
class LocalBlocks(SingleBlocks):
    """Attention that reads back to a moving start: blocks before it are freed while the request
    runs.

    `span`       tokens of a window, or of a chunk
    `align`      a reused prefix is a multiple of it
    `per_block`  digests of a block, the last of which is its own
    `in_flight`  tokens that are planned and not yet computed, at most: their blocks cannot be freed
                 yet
    """

    span: int
    align: int
    per_block: int = 1
    in_flight: int = 0

    def skipped(self, computed: int) -> int:
        """Return the leading blocks that the token behind `computed` tokens does not read."""
        raise NotImplementedError  # every kind has its own

    def most_held(self) -> int:
        """Return the most blocks that a request holds at once."""
        raise NotImplementedError  # every kind has its own

    def find(self, chain: Digests, limit: int) -> Prefix:
        raise NotImplementedError  # every kind has its own

    def publish(
        self, table: BlockTable, chain: Digests, tokens: int, boundaries: Boundaries, source: Source
    ) -> Sequence[int]:
        stop, published = tokens // self.size, []
        for index in self.kept(table.num_visited, stop, boundaries):
            if table.blocks[index] is not NULL_BLOCK:
                self.pool.publish_single(
                    self.index, table.blocks[index], self._digest(chain, index), source
                )
                published.append(index)
        table.num_visited = max(table.num_visited, stop)
        return published

    def kept(self, start: int, stop: int, boundaries: Boundaries) -> Iterable[int]:
        """Return the blocks of `[start, stop)` that a later request may need, increasing."""
        return range(start, stop)

    def _digest(self, chain: Digests, index: int) -> int:
        return chain[(index + 1) * self.per_block - 1]

    def needed(self, table: BlockTable, tokens: int, reused: Prefix, whole: bool = False) -> int:
        required, skipped = blocks_of(tokens, self.size), self.skipped(reused.count * self.size)
        if whole:
            required = min(required, self.most_held())
        return max(required - len(table.blocks) - reused.count, 0) + reused.unreferenced(skipped)

    def attach(self, table: BlockTable, reused: Prefix) -> None:
        skipped = self.skipped(reused.count * self.size)
        read = reused.runs[skipped:]
        self.pool.use(single_blocks(read))
        table.blocks = [NULL_BLOCK] * skipped + read
        table.num_visited, table.num_retired = reused.count, skipped

    def trim(self, table: BlockTable, computed: int) -> None:
        """Free the blocks before the first one that the next token reads, the last of them
        first."""
        start, stop = table.num_retired, min(self.skipped(computed), len(table.blocks))
        if stop > start:
            self.pool.free(reversed(table.blocks[start:stop]))
            table.blocks[start:stop] = [NULL_BLOCK] * (stop - start)
            table.num_retired = stop

    def room(self, table: BlockTable) -> int:
        return min(
            self.held(table), (table.num_visited + 1) * self.size - 1, self._read_until(table)
        )

    def _read_until(self, table: BlockTable) -> int:
        """Return the tokens after which the first block of the table is not read any more."""
        raise NotImplementedError  # every kind has its own


@dataclass(slots=True)
class WindowBlocks(LocalBlocks):
    """Sliding windows: a prefix needs the blocks of the window before its end.

    `drops`  1 where the last block of a match is computed again, for a drafter's keys and values;
             else 0
    `again`  tokens before a window that are kept beside it: several modules of a drafter write
             their keys again
    """

    drops: int = 0
    again: int = 0

    @property
    def needed_blocks(self) -> int:
        """Blocks that the first token behind a prefix reads, and the one behind them that is
        dropped."""
        return blocks_of(self.span - 1, self.size) + self.drops

    def skipped(self, computed: int) -> int:
        return max(0, computed - self.span + 1 - self.again) // self.size

    def most_held(self) -> int:
        # one more, for a window may start inside of a block
        return blocks_of(self.span - 1 + self.again + self.in_flight, self.size) + 1

    def find(self, chain: Digests, limit: int) -> Prefix:
        run: list[Run] = []  # blocks without a gap, the last one first
        for index in reversed(range(limit // self.size)):
            block = self.pool.find(self.index, self._digest(chain, index))
            if block is None:
                run = []
            elif run or (index + 1 - self.drops) * self.size % self.align == 0:
                run.append(block)
                if len(run) >= self.needed_blocks:
                    return single_blocks(
                        [NULL_BLOCK] * index + run[: self.drops - 1 if self.drops else None : -1]
                    )
        # shorter than a window, from the first token on
        return single_blocks(run[: self.drops - 1 if self.drops else None : -1])

    def kept(self, start: int, stop: int, boundaries: Boundaries) -> Iterable[int]:
        retention, tail, drops = boundaries.retention, self.needed_blocks, self.drops
        every = (
            0 if retention == 0 else (self.align if retention is None else retention) // self.size
        )
        if every and tail >= every:
            return range(start, stop)
        inside = range(max(start, drops), stop) if every else ()
        needed = {index for index in inside if (index - drops) % every >= every - tail}
        if retention is not None:
            for position in boundaries.positions:
                end = position // self.align * self.align // self.size + drops
                needed.update(range(max(start, end - tail), min(stop, end)))
        return sorted(needed)

    def _read_until(self, table: BlockTable) -> int:
        return (table.num_retired + 1) * self.size + self.span - 1 + self.again


class ChunkBlocks(LocalBlocks):
    """Local attention in chunks: a prefix needs the blocks since the start of the chunk of its next
    token."""

    __slots__ = ()

    def skipped(self, computed: int) -> int:
        return computed // self.span * self.span // self.size

    def most_held(self) -> int:
        return blocks_of(self.span + self.in_flight, self.size)

    def find(self, chain: Digests, limit: int) -> Prefix:
        start = self.skipped(limit)
        behind = self.pool.find_run(self.index, chain, start, limit // self.size)
        return single_blocks([NULL_BLOCK] * start + behind.runs)

    def _read_until(self, table: BlockTable) -> int:
        return blocks_of((table.num_retired + 1) * self.size, self.span) * self.span


@dataclass(slots=True)
class RingBlocks(SingleBlocks):
    """One block of a request, which it writes again and again: no other request reads it, and no
    prefix needs it."""

    def find(self, chain: Digests, limit: int) -> Prefix:
        return EMPTY_PREFIX

    def needed(self, table: BlockTable, tokens: int, reused: Prefix, whole: bool = False) -> int:
        return int(not table.blocks)

    def attach(self, table: BlockTable, reused: Prefix) -> None:
        """Do nothing: a ring is not reused."""

    def trim(self, table: BlockTable, computed: int) -> None:
        """Do nothing: it is written until the request ends."""

    def extend(self, table: BlockTable, tokens: int) -> None:
        if not table.blocks:
            table.blocks = self.pool.take_single(1)

    def publish(
        self, table: BlockTable, chain: Digests, tokens: int, boundaries: Boundaries, source: Source
    ) -> Sequence[int]:
        return ()

    def room(self, table: BlockTable) -> int:
        return UNLIMITED

    def held(self, table: BlockTable) -> int:
        return UNLIMITED


# ------------------------------------------------------------------------------
# States of recurrent layers.
# ------------------------------------------------------------------------------


@dataclass(slots=True)
class StateBlocks(SingleBlocks):
    """Recurrent layers: a request needs its last state; a prefix resumes from any stored state.

    Chunks end on block boundaries, and only the state at a chunk's end is written. Behind its
    block, a request holds a block for the state after each of its `drafts`. They move on with the
    request, and become blocks of its tokens.
    """

    drafts: int = 0

    def find(self, chain: Digests, limit: int) -> Prefix:
        # From the end, unlike attention, because a recurrent layer needs its last state alone
        # (vLLM, `MambaManager`).
        for index in reversed(range(min(limit // self.size, len(chain)))):
            block = self.pool.find(self.index, chain[index])
            if block is not None:
                return single_blocks([NULL_BLOCK] * index + [block])
        return EMPTY_PREFIX

    def needed(self, table: BlockTable, tokens: int, reused: Prefix, whole: bool = False) -> int:
        # Blocks before the last new one stay null: only the state at the end of a step is written,
        # and an inner one.
        new = max(blocks_of(tokens, self.size) + self.drafts - len(table.blocks) - reused.count, 0)
        most = 1 + table.inner + (0 if table.grown else self.drafts)
        return min(new, most) + reused.unreferenced()

    def attach(self, table: BlockTable, reused: Prefix) -> None:
        self.pool.use(reused)
        table.blocks = list(reused.runs)
        table.num_visited = reused.count

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
        needed, allocated = blocks_of(tokens, self.size) + self.drafts, len(table.blocks)
        behind = self.drafts if table.grown else 0
        table.grown = True
        if needed <= allocated:
            return
        if allocated:
            table.last_state = allocated - 1 - behind
        # blocks before the first one that the step writes
        empty = needed - self.drafts - 1 - table.inner
        table.blocks += [NULL_BLOCK] * (empty - allocated)
        for index in range(allocated - behind, min(allocated, empty)):
            table.blocks.append(table.blocks[index])
            table.blocks[index] = NULL_BLOCK
        table.blocks += self.pool.take_single(max(0, needed - len(table.blocks)))

    def publish(
        self, table: BlockTable, chain: Digests, tokens: int, boundaries: Boundaries, source: Source
    ) -> Sequence[int]:
        published, count = [], tokens // self.size
        for index in range(table.num_visited, count):
            if table.blocks[index] is not NULL_BLOCK and self._retains(index, boundaries):
                self.pool.publish_single(self.index, table.blocks[index], chain[index], source)
                published.append(index)
        table.num_visited = max(table.num_visited, count)
        return published

    def _retains(self, index: int, boundaries: Boundaries) -> bool:
        if boundaries.retention is None:
            return True
        if boundaries.retention and (index + 1) % max(boundaries.retention // self.size, 1) == 0:
            return True
        return any(position // self.size == index + 1 for position in boundaries.positions)

    def room(self, table: BlockTable) -> int:
        if self.drafts:
            return 0  # blocks move on with each step
        # behind the first token that no longer reads the state
        freed = (table.num_retired + 1) * self.size + 1
        return min(self.held(table), (table.num_visited + 1) * self.size - 1, freed)


def make_groups(pool: BlockPool, rules: BlockRules) -> list[BlockGroup]:
    """Return the groups of a layout, in its order; the first one of full attention has index 0, the
    others follow."""
    layout, ahead = rules.layout, rules.in_flight
    unit, align = unit_of(layout), alignment_of(layout)
    drops = int(rules.drops_last and all(rule.kind != "full" for rule in layout))
    again = max(0, rules.drafter - 1)
    groups: list[BlockGroup] = []
    full, others = iter([0]), iter(range(1, len(layout) + 1))
    for rule in layout:
        each = rule.size // unit
        if rule.kind == "full":
            index = next(full, None)
            groups.append(
                AttentionBlocks(pool, rule.size, next(others) if index is None else index, each)
            )
        elif rule.kind == "state":
            groups.append(StateBlocks(pool, rule.size, next(others), rules.drafts))
        elif rule.kind == "ring":
            groups.append(RingBlocks(pool, rule.size, next(others)))
        elif rule.kind == "chunk":
            groups.append(ChunkBlocks(pool, rule.size, next(others), rule.span, align, each, ahead))
        else:
            groups.append(
                WindowBlocks(
                    pool, rule.size, next(others), rule.span, align, each, ahead, drops, again
                )
            )
    return groups

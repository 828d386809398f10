"""A store of KV in chunks by chained hash, as in LMCache's host memory; semantics: LMCache 0.5.6.

It differs from the pool of `blocks` in three rules. Prompts are stored, outputs are not. A stored
chunk after the gap of an evicted one is not stored again, and keeps its age. The order of eviction
is different: reused chunks age from the last to the first, new chunks from the first to the last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from spanlab.core.ledger import Ledger
from spanlab.core.plan import DecodeBatch, Losses, Need, PrefillRange, ReusePlan, Work
from spanlab.core.policies.block_groups import AttentionBlocks, Boundaries
from spanlab.core.policies.block_pool import (
    BlockRules,
    BlockStore,
    BlockTable,
    Digests,
    Source,
    blocks_of,
)
from spanlab.core.policies.blocks import BlockAllocation, BlockPolicy
from spanlab.core.protocol import BeforeChange, unnoticed
from spanlab.core.repair import Repair
from spanlab.core.request import UNLIMITED, Request
from spanlab.core.rules import ReuseRules


class Chunks(AttentionBlocks):
    """Attention layers whose content is stored at most once."""

    def extend(self, table: BlockTable, tokens: int) -> None:
        new = blocks_of(tokens, self.size) - table.length
        if new > 0:
            table.blocks += self.pool.take_single(new)
            table.length += new

    def publish(
        self, table: BlockTable, chain: Digests, tokens: int, boundaries: Boundaries, source: Source
    ) -> Sequence[int]:
        start, stop = table.num_visited, max(table.num_visited, tokens // self.size)
        new = [
            index
            for index in range(start, stop)
            if self.pool.find(self.index, chain[index]) is None
        ]
        for index in new:
            self.pool.publish_single(self.index, table.blocks[index], chain[index], source)
        table.num_visited = stop
        return new

    def release(self, table: BlockTable) -> None:
        self.pool.free(reversed(table.blocks))


class ChunkPolicy(BlockPolicy):
    """Reuses the stored chunks of a prompt's prefix; for models of attention layers alone."""

    def __init__(self, rules: BlockRules, store: BlockStore, ledger: Ledger | None = None) -> None:
        super().__init__(rules, store, 1, ledger, [Chunks(store.pool, rules.size)])

    def _publish(self, allocation: BlockAllocation, stop: int, known: int | None = None) -> None:
        """Publish full chunks of the prompt only."""
        super()._publish(allocation, min(stop, allocation.plan.prompt), known)

    def append(self, allocation: BlockAllocation, start: int, stop: int, drafts: int = 0) -> bool:
        """Allocate and publish as a pool does; behind its prompt, a request only needs blocks."""
        granted = super().append(allocation, start, stop, drafts)
        if granted and stop > allocation.plan.prompt and not self.blocks.ahead:
            allocation.room = max(allocation.room, allocation.reserved)
        return granted

    def finish(self, allocation: BlockAllocation, generated: int, now: int) -> None:
        """Do nothing: output is not stored."""

    def free(self, allocation: BlockAllocation, now: int) -> None:
        """Free all chunks: reused ones, the last one first, then computed ones, the first one
        first."""
        blocks, reused = allocation.tables[0].blocks, allocation.plan.resume // self.blocks.size
        # freed from its end
        allocation.tables[0].blocks = [*reversed(blocks[reused:]), *blocks[:reused]]
        super().free(allocation, now)


# ------------------------------------------------------------------------------
# The block pool of `blocks` for requests with known lengths only: no two share a token, so
# blocks are only counted.
#
# Decisions are those of `BlockPolicy` on prompts without a common token, at a constant cost per
# request and step. A preempted request reuses its remaining blocks. Without prefix caching
# there is no reuse, and a request of a hybrid holds one state from its first step to its last,
# as in vLLM 0.32.0 with `mamba_cache_mode=none`.
# ------------------------------------------------------------------------------


class CountedBlocks:
    """Counts of blocks: in use, blank, and cached full blocks of freed requests, which are evicted
    first in, first out.

    The last block of a request is evicted first, so its cached blocks are always a prefix.
    """

    state_bytes = 0

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self._blank = num_blocks
        # full blocks by freed request, in order of release
        self._cached: OrderedDict[int, int] = OrderedDict()
        self.num_cached = self.num_used_full = 0
        self._published = self._evicted = 0

    @property
    def num_free(self) -> int:
        """Blocks that no request uses."""
        return self._blank + self.num_cached

    @property
    def kv_cached(self) -> int:
        """Bytes of full blocks, in use or cached."""
        return (self.num_cached + self.num_used_full) * self.block_bytes

    @property
    def state_cached(self) -> int:
        """Zero: no state is ever stored."""
        return 0

    @property
    def inserted_bytes(self) -> int:
        """Bytes of all blocks that ever became full."""
        return self._published * self.block_bytes

    @property
    def evicted_bytes(self) -> int:
        """Bytes of full blocks that were evicted."""
        return self._evicted * self.block_bytes

    def cached_blocks(self, request: int) -> int:
        """Return the number of cached full blocks of a request."""
        return self._cached.get(request, 0)

    def use(self, request: int, blocks: int) -> None:
        """Reuse the first `blocks` cached blocks of a request; its other cached blocks become
        blank."""
        cached = self._cached.pop(request, 0)
        self.num_cached -= cached
        self._blank += cached - blocks
        self.num_used_full += blocks

    def take(self, blocks: int) -> None:
        """Allocate blocks: blank ones, then cached ones of the request that was freed first."""
        assert blocks <= self.num_free, "more blocks were allocated than are free"
        blank = min(blocks, self._blank)
        self._blank -= blank
        blocks -= blank
        while blocks:
            request, cached = next(iter(self._cached.items()))
            evicted = min(cached, blocks)
            if evicted == cached:
                del self._cached[request]
            else:
                self._cached[request] = cached - evicted
            self.num_cached -= evicted
            self._evicted += evicted
            blocks -= evicted

    def fill(self, blocks: int) -> None:
        """Count blocks in use that became full."""
        self.num_used_full += blocks
        self._published += blocks

    def free(self, request: int, blocks: int, full: int) -> None:
        """Free all blocks of a request; its first `full` blocks stay cached."""
        self._blank += blocks - full
        self.num_used_full -= full
        self.num_cached += full
        if full:
            self._cached[request] = full


@dataclass(slots=True, eq=False)
class CountedAllocation:
    """Blocks of a running request: `num_blocks` for tokens `[0, stop)`, `full` of them full,
    `states` for its state."""

    plan: ReusePlan
    work: tuple[Work, ...]
    captures: list[int]
    num_blocks: int
    full: int
    stop: int
    states: int = 0
    captured: int = 0
    captured_maps: int = 0
    loading: bool = False

    @property
    def loads_state(self) -> bool:
        """False: no state is ever stored."""
        return False


class UnsharedPolicy:
    """Allocates the blocks that each step writes; only a preempted request reuses blocks, those of
    its prefix."""

    stores_when_scheduled = True

    def __init__(
        self, size: int, store: CountedBlocks, *, states: int = 0, caches: bool = True
    ) -> None:
        """`states`: blocks of one request's state; `caches`: whether full blocks stay cached after
        their request."""
        assert not (states and caches), "prefix caching of states needs BlockPolicy"
        self.size, self.store = size, store
        self._states, self._caches = states, caches
        self.rules = ReuseRules()

    def start_step(self, now: int) -> None:
        """Do nothing: nothing changes between steps."""

    def match(self, request: Request, now: int, generated: int = 0) -> ReusePlan:
        """Return the reuse of the request's cached blocks; at least one token is computed."""
        prompt = request.num_tokens
        cached = self.store.cached_blocks(request.id)
        resume = min(cached, (prompt + generated - 1) // self.size) * self.size
        losses = Losses(max(0, prompt - resume), 0, 0, 0, 0, 0, 0, 0)
        sizes = cached * self.size, cached * self.size, resume, resume
        return ReusePlan(request, prompt, (), Repair(), *sizes, losses)

    def allocate(
        self, plan: ReusePlan, now: int, generated: int = 0, drafts: int = 0
    ) -> CountedAllocation | None:
        """Reuse cached blocks; None, and no change, where the whole prompt and its drafts would not
        fit."""
        length = plan.prompt + generated
        if blocks_of(length + drafts, self.size) + self._states > self.store.num_free:
            return None
        reused = plan.resume // self.size
        self.store.use(plan.request.id, reused)
        return CountedAllocation(
            plan, (PrefillRange(0, plan.resume, length),), [], reused, reused, plan.resume
        )

    def chunk_end(self, plan: ReusePlan, start: int, stop: int, most: int, generated: int) -> int:
        """Return `stop`: a chunk may end anywhere."""
        return stop

    def append(self, allocation: CountedAllocation, start: int, stop: int, drafts: int = 0) -> bool:
        """Allocate the blocks of tokens `[start, stop)` and of drafts; False where there are not
        enough."""
        new = blocks_of(stop + drafts, self.size) - allocation.num_blocks
        states = self._states - allocation.states
        if new + states > self.store.num_free:
            return False
        if states:
            self.store.take(states)
            allocation.states = states
        self._extend(allocation, new, stop)
        return True

    def _extend(self, allocation: CountedAllocation, new: int, stop: int) -> None:
        if new > 0:
            self.store.take(new)
            allocation.num_blocks += new
        full = stop // self.size
        if full > allocation.full and self._caches:
            self.store.fill(full - allocation.full)
            allocation.full = full
        allocation.stop = stop

    def repeat(self, batch: DecodeBatch, times: int, before: BeforeChange = unnoticed) -> None:
        """Extend each allocation by `times` tokens, in the steps in which its blocks fill."""
        allocations, starts = batch.allocations(), batch.starts()
        fills: dict[int, list[tuple[CountedAllocation, int]]] = {}  # by the remainder of the step
        if self._caches and times > 1:
            for allocation, start in zip(allocations, starts, strict=True):
                fills.setdefault((-start - 1) % self.size, []).append((allocation, start))
        for step in range(times if fills else 0):
            if full := fills.get(step % self.size):
                before(step)
                for allocation, start in full:
                    stop = start + step + 1
                    self._extend(
                        allocation, blocks_of(stop, self.size) - allocation.num_blocks, stop
                    )
        for allocation, start in zip(allocations, starts, strict=True):
            stop = start + times
            self._extend(allocation, blocks_of(stop, self.size) - allocation.num_blocks, stop)

    def spare_steps(self, batch: DecodeBatch) -> int:
        """Return the exact number of decode steps for which memory of a batch suffices.

        Each takes a block when its last one is full, and then one per block size: after `rounds` of
        those, the remaining blocks go to the requests whose last block is fullest.
        """
        rounds, remaining = divmod(self.store.num_free, len(batch.sequences))
        allocations: list[CountedAllocation] = batch.allocations()
        room = sorted(
            [allocation.num_blocks * self.size - allocation.stop for allocation in allocations]
        )
        return rounds * self.size + room[remaining]

    def futile_steps(self, request: Request, batch: DecodeBatch) -> int:
        """Return `UNLIMITED`: decoding only allocates blocks."""
        return UNLIMITED

    def insert(
        self, allocation: CountedAllocation, computed: int, now: int, cache_span: int = 0
    ) -> None:
        """Do nothing: blocks count as full when they are scheduled."""

    def finish(self, allocation: CountedAllocation, generated: int, now: int) -> None:
        """Do nothing: no other request contains the output."""

    def free(self, allocation: CountedAllocation, now: int) -> None:
        """Free all blocks of a finished or preempted request."""
        self.store.free(
            allocation.plan.request.id, allocation.num_blocks + allocation.states, allocation.full
        )
        allocation.num_blocks = allocation.full = allocation.states = 0

    def need(self, request: Request) -> Need:
        """Return the largest memory of one request: whole blocks, and the null block of the
        engine's pool."""
        tokens = request.num_tokens + request.output_len - 1
        block_bytes = self.store.block_bytes
        null_block = 1
        kv = (blocks_of(tokens, self.size) + null_block) * block_bytes
        return Need(tokens, 0, 1, kv, self._states * block_bytes)

    def checkpoints(self, request: Request) -> list[int]:
        """Return an empty list: no states are stored."""
        return []

"""Prefix caching as vLLM does it: hashed blocks of one pool, states of hybrid models among them.

Blocks are findable from the moment they are scheduled, because every layer writes keys and values
before it reads them. A recurrent state is usable from the next step on. Memory is given out block
by block, and what a request has generated is stored like its prompt. Semantics: vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Sequence

from spanlab.core.ledger import Ledger
from spanlab.core.need import Need
from spanlab.core.policies.block_groups import (
    AttentionBlocks,
    BlockGroup,
    BlockTable,
    Boundaries,
    StateBlocks,
    blocks_of,
    waiting_among,
)
from spanlab.core.policies.block_match import BlockMatcher
from spanlab.core.policies.block_plan import BlockAllocation, BlockPlan
from spanlab.core.policies.block_pool import NULL_BLOCK, Block, BlockKey
from spanlab.core.policies.block_rules import BlockRules
from spanlab.core.policies.block_store import BlockStore
from spanlab.core.policies.refusal import Refusal
from spanlab.core.request import Request
from spanlab.core.reuse import ReusePlan
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.work import PrefillRange


class BlockPolicy:
    """Decides what each prompt reuses, and gives every step the blocks that it writes."""

    retries_each_step = True  # decoding publishes blocks and frees states, so a refusal may not last
    stores_when_scheduled = True

    def __init__(
        self,
        rules: BlockRules,
        store: BlockStore,
        grid: int = 1,
        ledger: Ledger | None = None,
        attention: AttentionBlocks | None = None,
    ) -> None:
        """`grid` is the chunk of the recurrent scan: it decides what scans cost, and nothing else."""
        self.blocks, self.store = rules, store
        self.ledger = Ledger() if ledger is None else ledger
        self.rules = ReuseRules(needs_states=rules.states != "none", grid=grid)
        self._pool = store.pool
        self._attention = AttentionBlocks(self._pool, rules.size) if attention is None else attention
        self._states = [
            StateBlocks(self._pool, rules.size, 1 + index)
            for index in range(rules.state_groups if rules.states != "none" else 0)
        ]
        self._groups: list[BlockGroup] = [self._attention, *self._states]
        self._matcher = BlockMatcher(rules, self._pool, self._attention, self._states, self.ledger)
        self._nothing: list[list[Block]] = [[] for _ in self._groups]  # found, by those who run
        self._fresh: set[BlockKey] = set()  # states written by the step that is being scheduled
        self._step = 0
        self._refusal: Refusal | None = None  # of the request that was refused last

    def start_step(self, now: int) -> None:
        """Let the states of the step before be used."""
        self._fresh.clear()
        self._step += 1

    # -- looking ------------------------------------------------------------------------------------------------------

    def match(self, request: Request, now: int, generated: int = 0) -> BlockPlan:
        """How much of prompt and output can be reused; at least one token is computed.

        The plan of a request that still does not fit is the one that was refused.
        """
        refusal = self._refusal
        if refusal is not None and refusal.is_of(request, generated) and refusal.holds(self._pool):
            assert isinstance(refusal.plan, BlockPlan), "a policy refuses its own plans"
            return refusal.plan
        return self._matcher.plan(request, generated)

    def checkpoints(self, request: Request) -> list[int]:
        """Positions of the states that are stored along a prompt, increasing."""
        return self._matcher.checkpoints(request)

    # -- running ------------------------------------------------------------------------------------------------------

    def allocate(self, plan: BlockPlan, now: int, generated: int = 0, drafts: int = 0) -> BlockAllocation | None:
        """Use what was found; None, and no change, where the whole prompt and drafts behind it would not fit.

        Room for them is looked at and not reserved. A state that this step writes cannot be read
        by this step.
        """
        refusal = self._refusal
        if refusal is not None and refusal.plan is plan and refusal.holds(self._pool):
            return None
        if not self.fits(plan, generated, drafts):
            self._refuse(plan, generated)
            return None
        tables = [BlockTable() for _ in self._groups]
        for group, table, found in zip(self._groups, tables, plan.found, strict=True):
            group.attach(table, found)
        work = PrefillRange(0, plan.resume, plan.prompt + generated)
        return BlockAllocation(plan, (work,), tables)

    def fits(self, plan: BlockPlan, generated: int = 0, drafts: int = 0) -> bool:
        """Whether the whole prompt and drafts would fit, and no state that it reads is written by this step."""
        tables = [BlockTable() for _ in self._groups]
        needed = self._needed(tables, plan.prompt + generated + drafts, plan.found)
        return needed <= self._pool.num_free and not self._waits_for_state(plan)

    def _refuse(self, plan: BlockPlan, generated: int) -> None:
        """Remember what did not fit, where the pool alone decides when it will."""
        pool, (found, *states) = self._pool, plan.found
        if states or pool.lower is not None:
            return
        length, size = plan.prompt + generated, self.blocks.size
        needed = blocks_of(length, size) - len(found) + (waiting := waiting_among(found))
        matched = len(found) + self.blocks.drops_last
        more = matched < (length - 1) // size
        following = self._matcher.chain(plan.request).upto(length)[matched] if more else None
        self._refusal = Refusal(plan, generated, needed, waiting, following, pool.num_revived, pool.num_evicted[0])

    def _waits_for_state(self, plan: BlockPlan) -> bool:
        return any(blocks and blocks[-1].key in self._fresh for blocks in plan.found[1:])

    def _needed(self, tables: Sequence[BlockTable], tokens: int, found: Sequence[Sequence[Block]]) -> int:
        parts = zip(self._groups, tables, found, strict=True)
        return sum([group.needed(table, tokens, blocks) for group, table, blocks in parts])

    def chunk_end(self, plan: ReusePlan, start: int, stop: int, most: int, generated: int) -> int:
        """Where a chunk that may reach `stop` ends: at a boundary whose state is to be kept.

        `most` is what one chunk may have at best. A block wider than that is computed in parts.
        """
        assert isinstance(plan, BlockPlan), "a policy gets its own plans back"
        length, size = plan.prompt + generated, self.blocks.size
        prefill_end = max(plan.prompt, length - 1)
        if self.blocks.states != "align" or start >= prefill_end:
            return stop
        if stop < prefill_end:
            aligned = stop // size * size
            stop = aligned if aligned > start or size <= most else stop
        junction = start + (plan.junction - start) // size * size
        stops = [(length - 1) // size * size]
        if start % size:
            stops.append((start // size + 1) * size)
        if start < plan.junction < stop:
            stops.append(junction)
        if self.blocks.cut and self.blocks.retention:
            stops.append((start // self.blocks.retention + 1) * self.blocks.retention)
        inside = [position for position in stops if start < position < stop]
        return max(min(inside, default=stop), start)

    def append(self, allocation: BlockAllocation, start: int, stop: int, drafts: int = 0) -> bool:
        """Give a request the blocks of tokens `[start, stop)` and publish those that get full.

        `drafts` tokens behind them get blocks, too, and are not published: they may be rejected. False where there are
        not enough; states that it does not read any more are freed even then.
        """
        if not drafts and stop <= allocation.room:
            return True
        settled = self._settled(allocation, start)
        for group, table in zip(self._groups, allocation.tables, strict=True):
            group.trim(table, settled)
        if self._needed(allocation.tables, stop + drafts, self._nothing) > self._pool.num_free:
            return False
        for group, table in zip(self._groups, allocation.tables, strict=True):
            group.extend(table, stop + drafts)
        allocation.begun, allocation.step = start, self._step
        decodes = start >= allocation.work[-1].stop
        self._publish(allocation, stop - (decodes and settled < start))
        if not (self._states or self.blocks.ahead):
            allocation.room = self._room(allocation.tables[0])
        return True

    def _settled(self, allocation: BlockAllocation, start: int) -> int:
        """Tokens of a request that are computed for certain when its step from `start` on is planned.

        Those of the step before are not, where that is under way meanwhile.
        """
        if not self.blocks.ahead:
            return start
        under_way = allocation.begun < start and allocation.step >= self._step - 1
        return allocation.begun if under_way else start

    def _room(self, table: BlockTable) -> int:
        """Tokens that go into blocks that the request has and fill none that is not published."""
        full = (table.looked_at + 1) * self.blocks.size
        return min(len(table.blocks) * self.blocks.size, full - 1)

    def _publish(self, allocation: BlockAllocation, stop: int) -> None:
        plan, count = allocation.plan, stop // self.blocks.size
        if count <= allocation.tables[0].looked_at and not self._states:
            return
        chain = self._matcher.chain(plan.request).upto(stop)
        positions = (plan.prompt - 1, plan.junction) if plan.junction else (plan.prompt - 1,)
        kept, source = Boundaries(positions, self.blocks.retention), self._matcher.chain(plan.request).source(stop)
        for at in self._attention.publish(allocation.tables[0], chain, count, kept):
            allocation.tables[0].blocks[at].source = source
        for group, table in zip(self._states, allocation.tables[1:], strict=True):
            published = group.publish(table, chain, count, kept)
            for at in published:
                table.blocks[at].source = source
            if count == (plan.prompt - 1) // self.blocks.size > 0 and table.blocks[count - 1] is not NULL_BLOCK:
                self._fresh.add(BlockKey(group.index, chain[count - 1]))  # the prompt's last boundary
            self._note_states(allocation, group, chain, published)

    def _note_states(
        self, allocation: BlockAllocation, group: StateBlocks, chain: Sequence[int], published: Sequence[int]
    ) -> None:
        """Remember what was stored now."""
        self._fresh.update([BlockKey(group.index, chain[at]) for at in published])
        if group.index == 1:
            self._matcher.ever_stored.update([chain[at] for at in published])
            allocation.captures = [(at + 1) * self.blocks.size for at in published]
            allocation.captured += len(published)

    def repeat(self, allocations: list[BlockAllocation], starts: list[int], times: int) -> None:
        """Step by step, so that blocks are published and states freed as if each step were scheduled."""
        for step in range(times):
            for allocation, start in zip(allocations, starts, strict=True):
                if start + step >= allocation.room:
                    granted = self.append(allocation, start + step, start + step + 1)
                    assert granted, "a step was given more tokens than there is memory for"

    def spare_steps(self, allocations: list[BlockAllocation]) -> int:
        """Decode steps that certainly find room for all of `allocations`."""
        each = 1 + 2 * len(self._states)
        return self._pool.num_free // (each * len(allocations)) * self.blocks.size

    def insert(self, allocation: BlockAllocation, computed: int, now: int, cache_span: int = 0) -> None:
        """Remember what has been computed; its blocks are findable already."""
        request = allocation.plan.request
        self.ledger.computed(request.cache_salt, self._matcher.chain(request).string(computed), computed)

    def finish(self, allocation: BlockAllocation, generated: int, now: int) -> None:
        """Publish what was still under way, and remember the output where another request may know it."""
        if self.blocks.ahead:
            self._publish(allocation, allocation.plan.prompt + generated)
        if allocation.plan.request.output is not None:
            self.insert(allocation, allocation.plan.prompt + generated, now)

    def free(self, allocation: BlockAllocation, now: int) -> None:
        """Free every block, last tokens first: the request has finished, or has been preempted."""
        for table in allocation.tables:
            self._pool.free(reversed(table.blocks))
        self._matcher.forget(allocation.plan.request)
        allocation.tables = []

    def need(self, request: Request) -> Need:
        """What one request may hold by itself: whole blocks, and two states a group where it crosses a boundary."""
        tokens = request.num_tokens + request.output_len - 1
        blocks, block_bytes = blocks_of(tokens, self.blocks.size), self.store.block_bytes
        null_block = 1
        states = min(blocks, 2) * len(self._states) * block_bytes
        return Need(tokens, 0, 1, (blocks + null_block) * block_bytes, states)

    def check(self) -> None:
        """Recount the pool from scratch."""
        self._pool.check()

"""Prefix caching as in vLLM: hashed blocks of one pool, with states of hybrid models among them.

Blocks are published when they are scheduled, because every layer writes keys and values before it
reads them. A recurrent state is usable from the next step on. Memory is allocated block by block, and
the output of a request is stored like its prompt. Semantics: vLLM 0.32.0.
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
    count_unreferenced,
)
from spanlab.core.policies.block_match import BlockMatcher
from spanlab.core.policies.block_plan import BlockAllocation, BlockPlan
from spanlab.core.policies.block_pool import NULL_BLOCK, Block, BlockKey
from spanlab.core.policies.block_rules import BlockRules
from spanlab.core.policies.block_store import BlockStore
from spanlab.core.policies.refusal import Refusal
from spanlab.core.protocol import BeforeChange, unnoticed
from spanlab.core.request import Request
from spanlab.core.reuse import ReusePlan
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.work import PrefillRange


class BlockPolicy:
    """Matches each prompt with the pool, and allocates the blocks that each step writes."""

    retries_each_step = True  # decoding publishes blocks and frees states, so a refused request may fit
    stores_when_scheduled = True

    def __init__(
        self,
        rules: BlockRules,
        store: BlockStore,
        grid: int = 1,
        ledger: Ledger | None = None,
        attention: AttentionBlocks | None = None,
    ) -> None:
        """`grid` is the chunk of the recurrent scan, which only determines the cost of scans."""
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
        self._no_blocks: list[list[Block]] = [[] for _ in self._groups]  # reused blocks of a running request
        self._fresh: set[BlockKey] = set()  # states written by the step that is being scheduled
        self._step = 0
        self._refusal: Refusal | None = None  # of the last refused request

    def start_step(self, now: int) -> None:
        """Make the states of the previous step usable."""
        self._fresh.clear()
        self._step += 1

    # -- matching -----------------------------------------------------------------------------------------------------

    def match(self, request: Request, now: int, generated: int = 0) -> BlockPlan:
        """Return the reuse of prompt and output; at least one token is computed.

        For a request that certainly still does not fit, this is its refused plan.
        """
        refusal = self._refusal
        if refusal is not None and refusal.matches(request, generated) and refusal.still_applies(self._pool):
            assert isinstance(refusal.plan, BlockPlan), "a policy refuses its own plans"
            return refusal.plan
        return self._matcher.plan(request, generated)

    def checkpoints(self, request: Request) -> list[int]:
        """Return the positions of the stored states along a prompt, increasing."""
        return self._matcher.checkpoints(request)

    # -- running ------------------------------------------------------------------------------------------------------

    def allocate(self, plan: BlockPlan, now: int, generated: int = 0, drafts: int = 0) -> BlockAllocation | None:
        """Reuse the matched blocks; None, and no change, where the whole prompt and its drafts would not fit.

        Memory for them is checked and not reserved. A state that this step writes cannot be read by this
        step.
        """
        refusal = self._refusal
        if refusal is not None and refusal.plan is plan and refusal.still_applies(self._pool):
            return None
        if not self.fits(plan, generated, drafts):
            self._refuse(plan, generated)
            return None
        tables = [BlockTable() for _ in self._groups]
        for group, table, reused in zip(self._groups, tables, plan.reused_blocks, strict=True):
            group.attach(table, reused)
        if plan.losses.kv_evicted:
            digests = self._matcher.chain(plan.request).digests[plan.matched // self.blocks.size :]
            self._matcher.kept.difference_update(self._matcher.evicted(digests))
        work = PrefillRange(0, plan.resume, plan.prompt + generated)
        return BlockAllocation(plan, (work,), tables)

    def fits(self, plan: BlockPlan, generated: int = 0, drafts: int = 0) -> bool:
        """Whether the whole prompt and its drafts fit, and this step writes no state that the request reads."""
        tables = [BlockTable() for _ in self._groups]
        needed = self._needed(tables, plan.prompt + generated + drafts, plan.reused_blocks)
        return needed <= self._pool.num_free and not self._waits_for_state(plan)

    def _refuse(self, plan: BlockPlan, generated: int) -> None:
        """Record a refused plan, where the state of the pool determines when it may fit."""
        pool, (reused, *states) = self._pool, plan.reused_blocks
        if states or pool.lower is not None:
            return
        length, size = plan.prompt + generated, self.blocks.size
        needed = blocks_of(length, size) - len(reused) + (unreferenced := count_unreferenced(reused))
        matched = len(reused) + self.blocks.drops_last
        reuses_more = matched < (length - 1) // size
        next_digest = self._matcher.chain(plan.request).digests_to(length)[matched] if reuses_more else None
        self._refusal = Refusal(
            plan, generated, needed, unreferenced, next_digest, pool.num_revived, pool.num_evicted[0]
        )

    def _waits_for_state(self, plan: BlockPlan) -> bool:
        return any(blocks and blocks[-1].key in self._fresh for blocks in plan.reused_blocks[1:])

    def _needed(self, tables: Sequence[BlockTable], tokens: int, reused: Sequence[Sequence[Block]]) -> int:
        groups = zip(self._groups, tables, reused, strict=True)
        return sum([group.needed(table, tokens, blocks) for group, table, blocks in groups])

    def chunk_end(self, plan: ReusePlan, start: int, stop: int, most: int, generated: int) -> int:
        """Return the end of a chunk that may reach `stop`: a boundary whose state is stored.

        `most` is the maximum number of tokens of a chunk. A block with more tokens is computed in several chunks.
        """
        assert isinstance(plan, BlockPlan), "the plan was made by another policy"
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
        """Allocate blocks for tokens `[start, stop)` of a request and publish those that become full.

        `drafts` tokens after them get blocks too, which are not published because drafts may be rejected. Return False
        where there are not enough blocks; states that the request no longer reads are freed even then.
        """
        if not drafts and stop <= allocation.room:
            return True
        num_computed = self._num_computed(allocation, start)
        for group, table in zip(self._groups, allocation.tables, strict=True):
            group.trim(table, num_computed)
        if self._needed(allocation.tables, stop + drafts, self._no_blocks) > self._pool.num_free:
            return False
        for group, table in zip(self._groups, allocation.tables, strict=True):
            group.extend(table, stop + drafts)
        allocation.begun, allocation.step = start, self._step
        decodes = start >= allocation.work[-1].stop
        self._publish(allocation, stop - (decodes and num_computed < start))
        if not (self._states or self.blocks.ahead):
            allocation.room = self._room(allocation.tables[0])
        return True

    def _num_computed(self, allocation: BlockAllocation, start: int) -> int:
        """Return the tokens of a request that are certainly computed when its step from `start` is planned.

        The tokens of the previous step are not, while that step still runs.
        """
        if not self.blocks.ahead:
            return start
        is_running = allocation.begun < start and allocation.step >= self._step - 1
        return allocation.begun if is_running else start

    def _room(self, table: BlockTable) -> int:
        """Return the tokens up to which the request needs no new block and fills no unpublished one."""
        full = (table.num_visited + 1) * self.blocks.size
        return min(len(table.blocks) * self.blocks.size, full - 1)

    def _publish(self, allocation: BlockAllocation, stop: int) -> None:
        plan, count = allocation.plan, stop // self.blocks.size
        if count <= allocation.tables[0].num_visited and not self._states:
            return
        digests = self._matcher.chain(plan.request).digests_to(stop)
        positions = (plan.prompt - 1, plan.junction) if plan.junction else (plan.prompt - 1,)
        boundaries = Boundaries(positions, self.blocks.retention)
        source = self._matcher.chain(plan.request).source(stop)
        for index in self._attention.publish(allocation.tables[0], digests, count, boundaries):
            allocation.tables[0].blocks[index].source = source
            self._matcher.kept.add(digests[index])
        for group, table in zip(self._states, allocation.tables[1:], strict=True):
            published = group.publish(table, digests, count, boundaries)
            for index in published:
                table.blocks[index].source = source
            if count == (plan.prompt - 1) // self.blocks.size > 0 and table.blocks[count - 1] is not NULL_BLOCK:
                self._fresh.add(BlockKey(group.index, digests[count - 1]))  # the prompt's last boundary
            self._record_states(allocation, group, digests, published)

    def _record_states(
        self, allocation: BlockAllocation, group: StateBlocks, digests: Sequence[int], published: Sequence[int]
    ) -> None:
        """Record newly published states."""
        self._fresh.update([BlockKey(group.index, digests[index]) for index in published])
        if group.index == 1:
            self._matcher.ever_stored.update([digests[index] for index in published])
            allocation.captures = [(index + 1) * self.blocks.size for index in published]
            allocation.captured += len(published)

    def repeat(
        self, allocations: list[BlockAllocation], starts: list[int], times: int, before: BeforeChange = unnoticed
    ) -> None:
        """Append step by step, so that blocks are published and states freed as if each step were scheduled."""
        for step in range(times):
            changes = False
            for allocation, start in zip(allocations, starts, strict=True):
                if start + step >= allocation.room:
                    if not changes:
                        changes = True
                        before(step)
                    granted = self.append(allocation, start + step, start + step + 1)
                    assert granted, "more steps were scheduled than memory allows"

    def spare_steps(self, allocations: list[BlockAllocation]) -> int:
        """Return a number of decode steps for which memory of all `allocations` certainly suffices."""
        per_request = 1 + 2 * len(self._states)
        return self._pool.num_free // (per_request * len(allocations)) * self.blocks.size

    def insert(self, allocation: BlockAllocation, computed: int, now: int, cache_span: int = 0) -> None:
        """Record the computed tokens; their blocks are published already."""
        request = allocation.plan.request
        self.ledger.computed(request.cache_salt, self._matcher.chain(request).string(computed), computed)

    def finish(self, allocation: BlockAllocation, generated: int, now: int) -> None:
        """Publish the blocks of the last step, and record the output where another request may contain it."""
        if self.blocks.ahead:
            self._publish(allocation, allocation.plan.prompt + generated)
        if allocation.plan.request.output is not None:
            self.insert(allocation, allocation.plan.prompt + generated, now)

    def free(self, allocation: BlockAllocation, now: int) -> None:
        """Free all blocks, last tokens first, of a finished or preempted request."""
        for table in allocation.tables:
            self._pool.free(reversed(table.blocks))
        self._matcher.forget(allocation.plan.request)
        allocation.tables = []

    def need(self, request: Request) -> Need:
        """Return the largest memory of one request: whole blocks, and two states per group if it crosses a boundary."""
        tokens = request.num_tokens + request.output_len - 1
        blocks, block_bytes = blocks_of(tokens, self.blocks.size), self.store.block_bytes
        null_block = 1
        states = min(blocks, 2) * len(self._states) * block_bytes
        return Need(tokens, 0, 1, (blocks + null_block) * block_bytes, states)

    def check(self) -> None:
        """Verify the pool by recounting."""
        self._pool.check()

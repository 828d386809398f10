"""Prefix caching as in vLLM: hashed blocks of one pool, with states of hybrid models among them.

Blocks are published when they are scheduled, because every layer writes keys and values before it
reads them. A recurrent state is usable from the next step on. Memory is allocated block by block,
and the output of a request is stored like its prompt. Semantics: vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from spanlab.core.ledger import Ledger
from spanlab.core.plan import (
    DecodeBatch,
    Losses,
    Match,
    Need,
    PrefillRange,
    ReusePlan,
    Work,
    losses_of,
)
from spanlab.core.policies.block_groups import (
    AttentionBlocks,
    BlockGroup,
    Boundaries,
    ChunkBlocks,
    RingBlocks,
    StateBlocks,
    make_groups,
)
from spanlab.core.policies.block_pool import (
    EMPTY_PREFIX,
    NULL_BLOCK,
    BlockKey,
    BlockPool,
    BlockRules,
    BlockStore,
    BlockTable,
    Chain,
    Digests,
    Prefix,
    alignment_of,
    blocks_of,
    unit_of,
)
from spanlab.core.protocol import BeforeChange, unnoticed
from spanlab.core.repair import Repair
from spanlab.core.request import UNLIMITED, Request
from spanlab.core.rules import ReuseRules
from spanlab.model_spec import BoundedReads

# ------------------------------------------------------------------------------
# The plan and the allocation of a request in a pool of hashed blocks.
# ------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class BlockPlan(ReusePlan):
    """A reuse plan over hashed blocks.

    `reused_blocks`  blocks per group, from the first token to the resume position
    `junction`       end of a shared prefix that full attention has, and another group has not; 0
                     without one
    `declined`       tokens in lower tiers that are computed nevertheless, because that is faster
    """

    reused_blocks: list[Prefix] = field(default_factory=list)
    junction: int = 0
    declined: int = 0

    def without_reuse(self) -> BlockPlan:
        """Return the plan itself: its reused blocks never reduce the memory that is available to
        it."""
        return self


@dataclass(slots=True, eq=False)
class BlockAllocation:
    """Blocks of a running request: one table per group.

    `captures`  positions of the states that the last extension published
    `captured`  number of published states in total
    `reserved`  tokens for which it has blocks in all groups
    `room`      tokens up to which `append` does nothing; 0 where it always does something, or steps
                are planned ahead
    `begun`     start position of the last step, where steps are planned ahead
    `step`      number of that step
    `loads_state`  whether the first step starts from a stored state
    `alone_from`   position from which on no other request can contain the tokens; with known
                   outputs, there is none
    """

    plan: BlockPlan
    work: tuple[Work, ...]
    tables: list[BlockTable]
    captures: list[int] = field(default_factory=list)
    captured: int = 0
    captured_maps: int = 0
    loading: bool = False
    reserved: int = 0
    room: int = 0
    begun: int = 0
    step: int = -1
    loads_state: bool = False
    alone_from: int = UNLIMITED


# ------------------------------------------------------------------------------
# Prefix match of a prompt in a pool of hashed blocks, and the causes of the tokens that are not
# reused.
# ------------------------------------------------------------------------------

NOTHING_LOST = Losses(0, 0, 0, 0, 0, 0, 0, 0)
NO_BOUNDARIES = Boundaries((), None)  # of attention layers, every full block is published


class BlockMatcher:
    """Looks up prompts, and caches their digests.

    `ever_stored`  digests at which a block of the first group behind full attention was ever stored
    """

    def __init__(
        self, rules: BlockRules, pool: BlockPool, groups: Sequence[BlockGroup], ledger: Ledger
    ) -> None:
        self._rules, self._pool, self._groups, self._ledger = rules, pool, groups, ledger
        full = [group for group in groups if isinstance(group, AttentionBlocks)]
        self._full, self._equals = (full[0] if full else None), full[1:]
        self._others = [
            group for group in groups if not isinstance(group, (AttentionBlocks, RingBlocks))
        ]
        kinds: dict[Hashable, list[BlockGroup]] = {}
        for group in self._others:
            kinds.setdefault((type(group), group.size, getattr(group, "span", 0)), []).append(group)
        self._kinds = list(kinds.values())  # groups that are looked up together, as in vLLM
        self._has_states = any(isinstance(group, StateBlocks) for group in groups)
        self.unit, self.align = unit_of(rules.layout), alignment_of(rules.layout)
        #: the group whose blocks stand for what is stored: full attention, else the first one.
        self.leading: BlockGroup = self._full or self._others[0]
        pool.remembered = self.leading.index
        self.first_other = next(iter(self._others), None)
        self._chains: dict[int, Chain] = {}
        self.ever_stored: set[int] = set()

    def chain(self, request: Request) -> Chain:
        """Return the digests of a request, which are cached until `forget`."""
        chain = self._chains.get(request.id)
        # the same id with its passages in another order
        if chain is None or chain.request is not request:
            chain = self._chains[request.id] = Chain(request, self.unit, self._rules.lookahead)
        return chain

    def forget(self, request: Request) -> None:
        """Drop the cached digests of a request."""
        self._chains.pop(request.id, None)

    def outputs(self) -> Iterator[Digests]:
        """Return the digests of all matched requests whose outputs are known, from their first
        tokens on."""
        for chain in self._chains.values():
            if (output := chain.request.output) is not None:
                yield chain.digests_to(len(chain.prompt) + len(output))

    def digests(self, chain: Chain) -> Digests:
        """Return the digests of the leading group's blocks."""
        each = self.leading.size // self.unit
        return chain.digests if each == 1 else chain.digests[each - 1 :: each]

    def keyed(self, known: int) -> int:
        """Return how many of the first `known` tokens are in blocks with a key, if no further token
        is known."""
        return max(0, known - self._rules.lookahead) // self.unit * self.unit

    def plan(self, request: Request, generated: int) -> BlockPlan:
        """Return the reuse of prompt and output; at least one token is computed."""
        chain, full = self.chain(request), self._full
        prompt = len(chain.prompt)
        length = prompt + generated
        digests, keyed = chain.digests_to(length), self.keyed(length)
        # Logits need one computed token, so that a prompt that is matched whole computes its last
        # block again (vLLM).
        if full is not None:
            matched = self._find_full(full, chain, digests, keyed, length)
            equal = [
                self._find_full(group, chain, digests, keyed, length) for group in self._equals
            ]
            if equal:
                matched = matched.first(min([prefix.count for prefix in equal]))
            end = matched.count * full.size
            deepest = self.aligned(self._rules.usable(matched.count) * full.size)
            limit = self.aligned(self._rules.reusable(matched.count, length) * full.size)
        else:
            matched, equal = EMPTY_PREFIX, []
            deepest, limit = self.aligned(keyed), self.aligned(min(keyed, length - 1))
        others, resume = self._find_others(chain, length, limit)
        resumable = resume if limit == deepest else self._find_others(chain, length, deepest)[1]
        if full is None:
            end, limit = resumable, resume
        junction = limit if resume < limit and self._rules.junctions else 0
        seen, losses = length, NOTHING_LOST
        if not generated:
            seen = max(self._ledger.lookup(request.cache_salt, chain.prompt)[0], end)
            losses = self._losses(length, chain, seen, end, resume)
        sizes = seen, end, resumable, resume
        attention, behind = iter([matched, *equal]), iter(others)
        reused: list[Prefix] = []
        for group in self._groups:
            if isinstance(group, AttentionBlocks):
                reused.append(next(attention).first(resume // group.size))
            else:
                reused.append(EMPTY_PREFIX if isinstance(group, RingBlocks) else next(behind))
        return BlockPlan(
            request, prompt, (), Repair(), *sizes, losses, reused_blocks=reused, junction=junction
        )

    def _find_full(
        self, group: AttentionBlocks, chain: Chain, digests: Digests, keyed: int, length: int
    ) -> Prefix:
        return chain.verified(group.find(digests, keyed), group.size, length)

    def aligned(self, tokens: int) -> int:
        """Return the tokens of the longest beginning that is reused in whole blocks of every
        group."""
        return tokens // self.align * self.align

    def _find_others(self, chain: Chain, length: int, limit: int) -> tuple[list[Prefix], int]:
        """Return what the groups behind full attention reuse of `limit` tokens, and the tokens that
        all can reuse."""
        # A kind of groups may lack a block that the end that another one found needs, which
        # shortens the prefix for all: repeat until they agree, as vLLM's coordinator of hybrid
        # caches does. A single kind is looked up once.
        reused: dict[int, Prefix] = {}
        while True:
            end = limit
            for equal in self._kinds:
                prefixes = self._find_equal(equal, chain, length, end)
                end = prefixes[0].count * equal[0].size
                reused.update(zip([group.index for group in equal], prefixes, strict=True))
            if end == limit or len(self._kinds) == 1:
                return [reused[group.index] for group in self._others], end
            limit = end

    def _find_equal(
        self, groups: Sequence[BlockGroup], chain: Chain, length: int, limit: int
    ) -> list[Prefix]:
        """Return what groups of one kind reuse of `limit` tokens: equally many blocks, which all of
        them have."""
        while True:
            prefixes = [self._verified(group, chain, length, limit) for group in groups]
            fewest = min([prefix.count for prefix in prefixes])
            # Of chunks, a beginning of the blocks counts, even if a chunk starts inside one.
            if isinstance(groups[0], ChunkBlocks):
                return [prefix.first(fewest) for prefix in prefixes]
            if all(prefix.count == fewest for prefix in prefixes):
                return prefixes
            limit = fewest * groups[0].size

    def _verified(self, group: BlockGroup, chain: Chain, length: int, limit: int) -> Prefix:
        """Return the blocks of a group's longest prefix that was computed from these tokens."""
        prefix = group.find(chain.digests_to(length), limit)
        while (verified := chain.verified(prefix, group.size, length).count) < prefix.count:
            prefix = group.find(chain.digests_to(length), verified * group.size)
        return prefix

    def _losses(self, length: int, chain: Chain, seen: int, matched: int, resume: int) -> Losses:
        unit, lead = self.align, self.leading.size
        usable = min(seen, length - 1)
        aligned = self.aligned(self._rules.reusable(seen // lead, length) * lead)
        present = min(self.aligned(self._rules.usable(matched // lead) * lead), aligned)
        each = self.unit
        once = (
            end
            for end in range(present, resume, -unit)
            if chain.digests[end // each - 1] in self.ever_stored
        )
        tombstone = next(once, resume) if self._others else present
        # Blocks behind a missing one may still be stored, but a prefix cannot reach them.
        index, digests = self.leading.index, self.digests(chain)
        stranded, evicted = self._pool.count_behind(index, digests, matched // lead, usable // lead)
        ends = min(matched, usable // lead * lead), present, resume, tombstone
        match = Match(length, seen, usable, aligned, *ends, unit)
        return losses_of(match, evicted * lead, stranded=stranded * lead)

    def missed(self, plan: BlockPlan) -> None:
        """Note that a request computes again what was evicted: one eviction explains one miss."""
        digests = self.digests(self.chain(plan.request))
        self._pool.miss(self.leading.index, digests, plan.matched // self.leading.size)

    def checkpoints(self, request: Request) -> list[int]:
        """Return the positions of the stored states along a prompt, increasing."""
        if not self._has_states:
            return []
        # not cached: the request may have finished
        digests, size = Chain(request, self.unit, self._rules.lookahead).digests, self.align
        ends = range(size, len(digests) * self.unit + 1, size)
        return [
            end
            for end in ends
            if all(group.find(digests, end).count * group.size == end for group in self._others)
        ]


# ------------------------------------------------------------------------------
# A prompt that did not fit into the pool, and the changes of the pool after which it may fit.
#
# A prompt needs memory for all its blocks except those that other requests are using. More of
# its blocks can be in use only after a free block is reused, or the block after the matched
# ones is published, or a matched block is evicted and computed again by another request.
# ------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Refusal:
    """A refused plan, and the pool at that time; for one group of blocks without lower tiers.

    `needed`        blocks that had to be free
    `unreferenced`  of these, matched blocks that no request used
    `digests`       of the matched blocks and the one behind them; empty where the prompt cannot
                    reuse more
    `revived`, `evicted`  the pool's counts
    """

    plan: ReusePlan
    generated: int
    needed: int
    unreferenced: int
    digests: Digests
    revived: int
    evicted: int

    def matches(self, request: Request, generated: int) -> bool:
        """Whether this request was refused, with the same number of output tokens."""
        return self.plan.request is request and self.generated == generated

    def still_applies(self, pool: BlockPool) -> bool:
        """Whether the prompt certainly does not fit yet."""
        recomputed = min(self.unreferenced, pool.num_evicted[0] - self.evicted)
        if pool.num_revived != self.revived or self.needed - recomputed <= pool.num_free:
            return False
        return pool.find_run(0, self.digests, 0, len(self.digests)).count < max(
            1, len(self.digests)
        )

    def outlasts_decoding(
        self, request: Request, pool: BlockPool, publishes_at_once: bool, outputs: Iterable[Digests]
    ) -> bool:
        """Whether it holds for a request until another ends or computes its prompt; `outputs` as of
        `BlockMatcher`.

        A block that decoding takes is one free block less, and evicts one block of this prompt at
        most.

        `publishes_at_once`  whether a prompt's blocks are published in the step that computes them
        """
        if self.plan.request is not request or not self.still_applies(pool):
            return False
        if not self.digests:
            return True
        last, following = len(self.digests) - 1, self.digests[-1]
        return publishes_at_once and all(
            len(output) <= last or output[last] != following for output in outputs
        )


class Calendar:
    """The steps in which a batch changes the pool: a step costs the sequences that change it, not
    all of them."""

    __slots__ = ("_due", "_num_joined", "_steps", "batch")

    def __init__(self, batch: DecodeBatch) -> None:
        self.batch, self._num_joined = batch, 0
        # numbers of the sequences that change the pool next, by step
        self._due: dict[int, list[int]] = {}
        self._steps: list[int] = []  # a heap of these steps

    def first(self) -> int:
        """Return the first step in which a sequence of the batch changes the pool."""
        batch = self.batch
        if batch.num_joined > self._num_joined:
            for number in reversed(batch.members):
                if number < self._num_joined:
                    break
                allocation, base = batch.members[number]
                self._add(max(batch.steps, allocation.room - base), number)
            self._num_joined = batch.num_joined
        while True:
            step = self._steps[0]
            if numbers := [number for number in self._due[step] if number in batch.members]:
                self._due[step] = numbers
                return step
            del self._due[heappop(self._steps)]

    def grow(self, step: int, policy: BlockPolicy) -> None:
        """Append a token to each sequence that changes the pool in the first step, in order of
        service."""
        for number in sorted(self._due.pop(heappop(self._steps))):
            if number not in self.batch.members:
                continue
            allocation: BlockAllocation
            allocation, base = self.batch.members[number]
            granted = policy.append(allocation, base + step, base + step + 1)
            assert granted, "more steps were scheduled than memory allows"
            self._add(max(step + 1, allocation.room - base), number)

    def _add(self, step: int, number: int) -> None:
        numbers = self._due.get(step)
        if numbers is None:
            self._due[step] = [number]
            heappush(self._steps, step)
        else:
            numbers.append(number)


class BlockPolicy:
    """Matches each prompt with the pool, and allocates the blocks that each step writes."""

    stores_when_scheduled = True

    def __init__(
        self,
        rules: BlockRules,
        store: BlockStore,
        grid: int = 1,
        ledger: Ledger | None = None,
        groups: Sequence[BlockGroup] | None = None,
        bounded: tuple[BoundedReads, ...] = (),
    ) -> None:
        """`grid`, the chunk of the recurrent scan, and `bounded`, the reads of windows, only
        determine costs."""
        self.blocks, self.store = rules, store
        self.ledger = Ledger() if ledger is None else ledger
        self._pool, layout = store.pool, rules.layout
        self._groups = make_groups(self._pool, rules) if groups is None else groups
        self._states = [group for group in self._groups if isinstance(group, StateBlocks)]
        store.kv_groups = frozenset(
            group.index for group in self._groups if not isinstance(group, StateBlocks)
        )
        self._full_only = len(self._groups) == 1 and layout[0].kind == "full"
        self._keys_tails = rules.keys_tails
        self._trims = any(rule.kind in ("window", "chunk") for rule in layout)
        # Blocks are only added and published, a block as soon as its last token is planned.
        self._grows_only = self._full_only and type(self._groups[0]) is AttentionBlocks
        self._grows_only = self._grows_only and not (rules.drafter or rules.ahead)
        self._calendar: Calendar | None = None  # of the sequences that decoded last
        self.rules = ReuseRules(
            needs_states=bool(self._states),
            grid=grid,
            serves_behind=rules.release.serves_behind,
            admits_behind=rules.release.admits_behind,
            checks_first_chunk=self._trims,
            bounded=bounded,
        )
        self._matcher = BlockMatcher(rules, self._pool, self._groups, self.ledger)
        self._nothing = [EMPTY_PREFIX] * len(self._groups)  # what a running request reuses
        self._fresh: set[BlockKey] = set()  # states written by the step that is being scheduled
        self._step = 0
        self._refusal: Refusal | None = None  # of the last refused request

    def start_step(self, now: int) -> None:
        """Make the states of the previous step usable."""
        self._fresh.clear()
        self._step += 1

    # -- matching ----------------------------------------------------------------------------------

    def match(self, request: Request, now: int, generated: int = 0) -> BlockPlan:
        """Return the reuse of prompt and output; at least one token is computed.

        For a request that certainly still does not fit, this is its refused plan.
        """
        refusal = self._refusal
        if (
            refusal is not None
            and refusal.matches(request, generated)
            and refusal.still_applies(self._pool)
        ):
            assert isinstance(refusal.plan, BlockPlan), "a policy refuses its own plans"
            return refusal.plan
        return self._matcher.plan(request, generated)

    def checkpoints(self, request: Request) -> list[int]:
        """Return the positions of the stored states along a prompt, increasing."""
        return self._matcher.checkpoints(request)

    # -- running -----------------------------------------------------------------------------------

    def allocate(
        self, plan: BlockPlan, now: int, generated: int = 0, drafts: int = 0
    ) -> BlockAllocation | None:
        """Reuse the matched blocks; None, and no change, where the whole prompt and its drafts
        would not fit.

        Memory for them is checked and not reserved. A state that this step writes cannot be read by
        this step.
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
            self._matcher.missed(plan)
        work = PrefillRange(0, plan.resume, plan.prompt + generated)
        alone_from = work.stop if plan.request.output is None else UNLIMITED
        loads_state = bool(self._states) and plan.resume > 0
        return BlockAllocation(
            plan, (work,), tables, loads_state=loads_state, alone_from=alone_from
        )

    def fits(self, plan: BlockPlan, generated: int = 0, drafts: int = 0) -> bool:
        """Whether the whole prompt and its drafts fit, and this step writes no state that the
        request reads.

        `drafts` tokens lie between the end of the prompt and that of the first step; below 0, the
        step ends before.
        """
        length, free = plan.prompt + generated, self._pool.num_free
        inner = self.blocks.stores_inside(plan.resume, length, length)
        tables = [BlockTable(inner=inner) for _ in self._groups]
        # a prompt frees blocks on the way, so that its first step may need more than its whole
        if self._trims:
            whole = self._needed(tables, self._tokens(length, 0), plan.reused_blocks, whole=True)
            fits = (
                max(whole, self._needed(tables, self._tokens(length, drafts), plan.reused_blocks))
                <= free
            )
        else:
            fits = (
                self._needed(tables, self._tokens(length, max(0, drafts)), plan.reused_blocks)
                <= free
            )
        if not (fits and self._states):
            return fits
        return not any(
            reused.runs and reused.runs[-1].key in self._fresh for reused in plan.reused_blocks
        )

    def _refuse(self, plan: BlockPlan, generated: int) -> None:
        """Record a refused plan, where the state of the pool determines when it may fit."""
        pool = self._pool
        if not self._full_only or pool.lower is not None:
            return
        reused, length, size = plan.reused_blocks[0], plan.prompt + generated, self.blocks.size
        needed = blocks_of(length, size) - reused.count + (unreferenced := reused.unreferenced())
        matched = reused.count + self.blocks.drops_last
        reuses_more = matched < min((length - 1) // size, self._matcher.keyed(length) // size)
        digests = self._matcher.chain(plan.request).digests_to(length)[
            : matched + 1 if reuses_more else 0
        ]
        self._refusal = Refusal(
            plan, generated, needed, unreferenced, digests, pool.num_revived, pool.num_evicted[0]
        )

    def _needed(
        self,
        tables: Sequence[BlockTable],
        tokens: Sequence[int],
        reused: Sequence[Prefix],
        whole: bool = False,
    ) -> int:
        if self._full_only:
            return self._groups[0].needed(tables[0], tokens[0], reused[0])
        groups = zip(self._groups, tables, tokens, reused, strict=True)
        return sum(
            [group.needed(table, count, prefix, whole) for group, table, count, prefix in groups]
        )

    def _tokens(self, stop: int, drafts: int) -> Sequence[int]:
        """Return the tokens that need blocks by group: a drafter that looks ahead of its drafts has
        no states."""
        if not self._states:
            return [stop + drafts] * len(self._groups)
        lookahead = self.blocks.drafts if self.blocks.drafter else 0
        of_states = stop + max(0, drafts - lookahead)
        return [
            of_states if isinstance(group, StateBlocks) else stop + drafts for group in self._groups
        ]

    def chunk_end(self, plan: ReusePlan, start: int, stop: int, most: int, generated: int) -> int:
        """Return the end of a chunk that may reach `stop`: a boundary whose state is stored.

        `most` is the maximum number of tokens of a chunk. A block with more tokens is computed in
        several chunks.
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
        inner = stop >= prefill_end and self.blocks.stores_inside(start, stop, prefill_end)
        stops = [] if inner else [self.blocks.last_state(length)]
        if start % size:
            stops.append((start // size + 1) * size)
        if start < plan.junction < stop:
            stops.append(junction)
        if self.blocks.cut and self.blocks.retention:
            stops.append((start // self.blocks.retention + 1) * self.blocks.retention)
        inside = [position for position in stops if start < position < stop]
        return max(min(inside, default=stop), start)

    def append(self, allocation: BlockAllocation, start: int, stop: int, drafts: int = 0) -> bool:
        """Allocate blocks for tokens `[start, stop)` of a request and publish those that become
        full.

        `drafts` tokens after them get blocks too, which are not published because drafts may be
        rejected. Return False where there are not enough blocks; states that the request no longer
        reads are freed even then. Without tokens, at the end of a step, those are published that it
        accepted.
        """
        if not drafts and stop <= allocation.room:
            return True
        if start == stop:
            if self.blocks.release.accepted_at_end or self.blocks.ahead:
                self._publish(allocation, stop, stop + 1)
            allocation.begun = stop  # rejected drafts lie before the step that is planned ahead
            return True
        if self._grows_only and not drafts:
            return self._grow(allocation, start, stop)
        num_computed = start
        # tokens of the previous step are not certainly computed while that step still runs
        if self.blocks.ahead and allocation.begun < start and allocation.step >= self._step - 1:
            num_computed = allocation.begun
        if self.blocks.inner_states:
            length = allocation.work[-1].stop
            # states of all chunks are kept, but for a retention of 0
            is_last = self.blocks.retention != 0 or stop >= max(allocation.plan.prompt, length - 1)
            for table in allocation.tables:
                table.inner = is_last and self.blocks.stores_inside(start, stop, stop)
        for group, table in zip(self._groups, allocation.tables, strict=True):
            group.trim(table, num_computed)
        tokens = self._tokens(stop, drafts)
        if self._needed(allocation.tables, tokens, self._nothing) > self._pool.num_free:
            return False
        for group, table, count in zip(self._groups, allocation.tables, tokens, strict=True):
            group.extend(table, count)
        allocation.reserved = min(
            [
                group.held(table)
                for group, table in zip(self._groups, allocation.tables, strict=True)
            ]
        )
        allocation.begun, allocation.step = start, self._step
        decodes = start >= allocation.work[-1].stop
        self._publish(allocation, stop - (decodes and num_computed < start))
        if not (self.blocks.ahead or self._keys_tails):
            rooms = [
                group.room(table)
                for group, table in zip(self._groups, allocation.tables, strict=True)
            ]
            allocation.room = min(rooms)
        return True

    def _grow(self, allocation: BlockAllocation, start: int, stop: int) -> bool:
        """Append as `append` does, in fewer operations: decoding does little else in a simulation
        of long outputs.

        A block with a token of an output without known ids is only counted: no other request can
        contain it.
        """
        table, size, pool = allocation.tables[0], self.blocks.size, self._pool
        new = blocks_of(stop, size) - table.length
        if new > 0:
            if new > pool.num_free:
                return False
            pool.take_later(new)
            table.length += new
        full = stop // size
        if full > table.num_visited:
            if start >= allocation.alone_from and pool.lower is None:
                pool.count(0, table, full)
            else:
                chain = self._matcher.chain(allocation.plan.request)
                pool.publish(0, table, chain.digests_to(stop), full, chain.source(stop))
        reserved, unpublished = table.length * size, (table.num_visited + 1) * size - 1
        allocation.reserved = reserved
        allocation.room = reserved if reserved < unpublished else unpublished
        return True

    def _publish(self, allocation: BlockAllocation, stop: int, known: int | None = None) -> None:
        """Publish the full blocks of the first `stop` tokens; `known` tokens exist, None: those and
        the prompt's."""
        plan, matcher = allocation.plan, self._matcher
        tokens, final = matcher.aligned(stop), self.blocks.final(stop)
        if self.blocks.lookahead:
            known = max(allocation.work[-1].stop, stop) if known is None else known
            tokens = min(tokens, matcher.keyed(known))
        of_attention = min(matcher.aligned(final), tokens)
        # a block behind the last end of a match, which is dropped with it
        if self.blocks.drops_last and tokens:
            of_attention = min(final, of_attention + self.blocks.size)
        if self._full_only and of_attention <= allocation.tables[0].num_visited * self.blocks.size:
            return
        chain = matcher.chain(plan.request)
        digests, source = chain.digests_to(stop), chain.source(stop + self.blocks.lookahead)
        boundaries = NO_BOUNDARIES
        if not self._full_only:
            positions = self.blocks.resumed_at(plan.prompt)
            positions = (*positions, plan.junction) if plan.junction else positions
            full = plan.prompt // matcher.unit * matcher.unit if self._keys_tails else 0
            boundaries = Boundaries(positions, self.blocks.retention, full)
        for group, table in zip(self._groups, allocation.tables, strict=True):
            # by several modules
            rewritten = isinstance(group, AttentionBlocks) or len(self._groups) == 1
            reach = of_attention if rewritten else tokens
            stored = group.publish(table, digests, reach, boundaries, source)
            if group is matcher.first_other and group is not matcher.leading:
                each = group.size // matcher.unit
                matcher.ever_stored.update([digests[(index + 1) * each - 1] for index in stored])
            if isinstance(group, StateBlocks):
                self._note_states(allocation, group, table, digests, stored, tokens // group.size)

    def _note_states(
        self,
        allocation: BlockAllocation,
        group: StateBlocks,
        table: BlockTable,
        digests: Sequence[int],
        stored: Sequence[int],
        count: int,
    ) -> None:
        """Record the states that were stored: requests of the same step cannot read them."""
        is_last = count * group.size == self.blocks.last_state(allocation.plan.prompt) > 0
        if (
            self.blocks.release.renews_states
            and is_last
            and table.blocks[count - 1] is not NULL_BLOCK
        ):
            self._fresh.add(BlockKey(group.index, digests[count - 1]))
        self._fresh.update([BlockKey(group.index, digests[index]) for index in stored])
        if group is self._states[0]:
            allocation.captures = [(index + 1) * group.size for index in stored]
            allocation.captured += len(stored)

    def repeat(self, batch: DecodeBatch, times: int, before: BeforeChange = unnoticed) -> None:
        """Append step by step, so that blocks are published and states freed as if each step were
        scheduled."""
        if not batch.sequences:
            return
        calendar, begin = self._calendar_of(batch), batch.steps
        while (step := calendar.first()) < begin + times:
            before(step - begin)
            calendar.grow(step, self)

    def _calendar_of(self, batch: DecodeBatch) -> Calendar:
        if self._calendar is None or self._calendar.batch is not batch:
            self._calendar = Calendar(batch)
        return self._calendar

    def spare_steps(self, batch: DecodeBatch) -> int:
        """Return a number of decode steps for which memory of a batch certainly suffices."""
        per_request = len(self._groups) + len(self._states)
        free, count, unit = self._pool.num_free, len(batch.sequences), self._matcher.unit
        if free >= per_request * count or self.blocks.drafts or self.blocks.ahead:
            return free // (per_request * count) * unit
        # Not enough for all: the requests take blocks in the order in which their last ones are
        # full.
        fulls: list[int] = sorted(
            [allocation.reserved - base for allocation, base in batch.members.values()]
        )
        return max(0, min(unit, fulls[free // per_request] - batch.steps))

    def futile_steps(self, request: Request, batch: DecodeBatch) -> int:
        """Return the steps before decoding publishes a block or frees one, and `UNLIMITED` where
        that changes nothing.

        A block of full attention that decoding fills holds a token of an output. It can be the next
        one that a refused prompt reuses only where outputs are known and this prompt contains one
        of them.
        """
        refusal, pool = self._refusal, self._pool
        outputs = self._matcher.outputs()
        if refusal is not None and refusal.outlasts_decoding(
            request, pool, self._grows_only, outputs
        ):
            return UNLIMITED
        if self._fresh or pool.lower is not None or not batch.sequences:
            return 0
        return max(0, self._calendar_of(batch).first() - batch.steps)

    def insert(
        self, allocation: BlockAllocation, computed: int, now: int, cache_span: int = 0
    ) -> None:
        """Record the computed tokens; their blocks are published already."""
        request = allocation.plan.request
        self.ledger.computed(
            request.cache_salt, self._matcher.chain(request).string(computed), computed
        )

    def finish(self, allocation: BlockAllocation, generated: int, now: int) -> None:
        """Publish the blocks of the last step, and record the output where another request may
        contain it."""
        if self.blocks.ahead:
            self._publish(allocation, allocation.plan.prompt + generated)
        if allocation.plan.request.output is not None:
            self.insert(allocation, allocation.plan.prompt + generated, now)

    def free(self, allocation: BlockAllocation, now: int) -> None:
        """Free all blocks, last tokens first, of a finished or preempted request."""
        for group, table in zip(self._groups, allocation.tables, strict=True):
            if table.unkeyed:
                chain = self._matcher.chain(allocation.plan.request)
                length = table.num_visited * group.size
                self._pool.publish_counted(
                    group.index, table, chain.digests_to(length), chain.source(length)
                )
            # The end of a prompt is evicted before its beginning, which more requests share.
            group.release(table)
        self._matcher.forget(allocation.plan.request)
        allocation.tables = []

    def need(self, request: Request) -> Need:
        """Return the largest memory of one request: per group, the blocks or states that it holds
        at once."""
        tokens, block_bytes = request.num_tokens + request.output_len - 1, self.store.block_bytes
        null_block, kv, of_states = 1, 0, 0
        for group in self._groups:
            if isinstance(group, StateBlocks):
                of_states += (
                    min(blocks_of(tokens, group.size), 2 + self.blocks.inner_states)
                    + self.blocks.drafts
                )
            else:
                kv += group.needed(BlockTable(), tokens, EMPTY_PREFIX, whole=True)
        return Need(tokens, 0, 1, (kv + null_block) * block_bytes, of_states * block_bytes)

    def check(self) -> None:
        """Verify the pool by recounting."""
        self._pool.check()

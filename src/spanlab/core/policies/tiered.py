"""A pool of hashed blocks over lower tiers of memory: their blocks are loaded where that is faster than computing.

The policy of the pool decides as ever, over a pool that also finds what lower tiers have. What is loaded gets memory of
the pool at once, and other requests find it when it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spanlab.core.need import Need
from spanlab.core.policies.block_plan import BlockAllocation, BlockPlan
from spanlab.core.policies.block_pool import Block, BlockKey
from spanlab.core.policies.block_store import BlockStore
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.request import Request
from spanlab.core.reuse import ReusePlan
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.tiers.load import Load, LoadNote, overlapped
from spanlab.core.tiers.tiers import Tiers

#: Nanoseconds of each step that computing prompt tokens [start, stop) alone takes.
PrefillSteps = Callable[[int, int], Sequence[int]]


@dataclass(slots=True, eq=False)
class _Arrival:
    """The blocks that a load under way fills, and who waits for them."""

    blocks: list[tuple[BlockKey, Block]]
    waiting: list[_Waiting] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that cannot run before its loads have ended, of which so many are left."""

    allocation: BlockAllocation
    note: LoadNote
    since: int
    left: int


class TieredPolicy:
    """Offers requests what lower tiers have, and writes to those what the pool stores or gives up.

    `steps`   what computing costs; None: whatever can be loaded is
    `layers`  of the model, which a layerwise load follows
    `notes`   what tiers did for each request, by its id, until `take_note`
    """

    def __init__(self, blocks: BlockPolicy, tiers: Tiers, steps: PrefillSteps | None, layers: int) -> None:
        self._blocks, self.tiers, self._steps, self._layers = blocks, tiers, steps, layers
        self._pool = blocks.store.pool
        self._pool.lower = self
        self._now = 0
        self._depth = 0  # how many tiers `find` looks at; none outside of `match`
        self._arrivals: dict[Load, _Arrival] = {}
        self._coming: dict[BlockKey, tuple[Block, Load]] = {}
        self._layerwise: list[tuple[Load, LoadNote]] = []  # begun by the step that is being scheduled
        self.notes: dict[int, LoadNote] = {}
        self.retries_each_step, self.stores_when_scheduled = blocks.retries_each_step, blocks.stores_when_scheduled

    @property
    def rules(self) -> ReuseRules:
        return self._blocks.rules

    @property
    def store(self) -> BlockStore:
        return self._blocks.store

    # -- what the pool asks -------------------------------------------------------------------------------------------

    def find(self, key: BlockKey) -> Block | None:
        """A block that is coming, or one that stands for what a tier has; None where none of those looked at has it."""
        if not self._depth:
            return None
        coming = self._coming.get(key)
        if coming is not None:
            return coming[0] if coming[1].depth <= self._depth else None
        if self.tiers.holder(key, self._depth) is None:
            return None
        return Block(key.group, key.digest)

    def published(self, key: BlockKey) -> None:
        """Note what the pool stores."""
        self.tiers.published(key)

    def evicted(self, key: BlockKey) -> None:
        """Note what the pool gives up."""
        self.tiers.evicted(key)

    # -- matching -----------------------------------------------------------------------------------------------------

    def match(self, request: Request, now: int, generated: int = 0) -> BlockPlan:
        """How much can be reused: of what tiers have, that which makes the prompt ready soonest; changes nothing."""
        every = self._look(len(self.tiers), request, now, generated)
        if self._steps is None or not (self._absent(every) or self._joined(every)):
            return every
        plans = [self._look(depth, request, now, generated) for depth in range(len(self.tiers))]
        ready = {plan: self._ready_ns(plan, self._steps, now, generated) for plan in (*plans, every)}
        chosen = min(ready, key=ready.__getitem__)
        chosen.declined = every.resume - chosen.resume
        return chosen

    def _look(self, depth: int, request: Request, now: int, generated: int) -> BlockPlan:
        self._depth = depth
        try:
            return self._blocks.match(request, now, generated)
        finally:
            self._depth = 0

    def _absent(self, plan: BlockPlan) -> list[Block]:
        """The stand-ins of a plan for what is in lower tiers alone, in order."""
        blocks = [block for found in plan.found for block in found]
        return [block for block in blocks if block.key is not None and self._pool.find(*block.key) is not block]

    def _joined(self, plan: BlockPlan) -> list[Load]:
        """Loads under way that bring blocks of a plan."""
        loads = dict(self._coming.values())
        blocks = [block for found in plan.found for block in found] if loads else []
        return list(dict.fromkeys([loads[block] for block in blocks if block in loads]))

    def _ready_ns(self, plan: BlockPlan, steps: PrefillSteps, now: int, generated: int) -> int:
        """Nanoseconds until the prompt of a plan would be computed if nothing else ran."""
        tiers = self.tiers
        parts = tiers.by_tier(_keys(self._absent(plan)))
        delays = [tiers.links[number].delay(tiers.bytes_of(number, keys)) for number, keys in parts.items()]
        joined = [tiers.load_ends_at(load) - now for load in self._joined(plan)]
        first, *others = steps(plan.resume, plan.prompt + generated)
        if tiers.are_layerwise(parts):
            first = overlapped(max(delays, default=0), first, self._layers)
            delays = []
        return max([0, *delays, *joined]) + first + sum(others)

    # -- loading ------------------------------------------------------------------------------------------------------

    def start_step(self, now: int) -> None:
        """Let transfers end, and requests run whose blocks are there."""
        self._now = now
        self._blocks.start_step(now)
        self._layerwise.clear()
        self.tiers.advance(now)
        self._arrive()

    def allocate(self, plan: BlockPlan, now: int, generated: int = 0, drafts: int = 0) -> BlockAllocation | None:
        """Use what was found and let the rest of it be loaded; None, and no change, where the prompt would not fit."""
        if not self._blocks.fits(plan, generated, drafts):
            return None
        absent, loads = self._absent(plan), self._joined(plan)
        keys = _keys([block for found in plan.found for block in found])
        there = _blocks_but(plan, absent) if absent else []
        note = self.notes.setdefault(plan.request.id, LoadNote([0] * len(self.tiers)))
        note.declined += plan.declined
        self._pool.use(there)  # so that what is loaded does not take their memory
        if absent:
            loads += self._begin(plan, absent, note, now)
        allocation = self._blocks.allocate(plan, now, generated, drafts)
        self._pool.free(there)
        assert allocation is not None, "what fits before its blocks are taken fits with them"
        self._wait_for(loads, _Waiting(allocation, note, now, len(loads)))
        self.tiers.used(keys, now)
        self.tiers.settle(now)
        self._arrive()
        return allocation

    def _begin(self, plan: BlockPlan, absent: list[Block], note: LoadNote, now: int) -> list[Load]:
        """Load blocks into memory of the pool, in place of those that stand for them; returns what must be waited for.

        The load holds its memory until it has ended, as the request does from now on.
        """
        keys = _keys(absent)
        load = self.tiers.load(keys, now)
        for number, num_bytes in load.num_bytes.items():
            note.bytes[number] += num_bytes
        note.tokens += self._blocks.blocks.size * sum(key.group == 0 for key in keys)
        taken = self._pool.take(len(absent))
        filled = dict(zip(absent, taken, strict=True))
        plan.found = [[filled.get(block, block) for block in found] for found in plan.found]
        blocks = list(zip(keys, taken, strict=True))
        if load.layerwise:
            self._layerwise.append((load, note))
            self._publish(blocks)
            return []
        self._arrivals[load] = _Arrival(blocks)
        self._coming |= {key: (block, load) for key, block in blocks}
        return [load]

    def _publish(self, blocks: Sequence[tuple[BlockKey, Block]]) -> None:
        """Make loaded blocks findable, and leave them to the requests that use them."""
        for key, block in blocks:
            self._pool.publish(key.group, [block], [key.digest])
        self._pool.free([block for _, block in reversed(blocks)])

    def _wait_for(self, loads: list[Load], waiting: _Waiting) -> None:
        """Let a request wait for loads under way."""
        waiting.allocation.loading = bool(loads)
        for load in loads:
            self._arrivals[load].waiting.append(waiting)

    def _arrive(self) -> None:
        """Make what has been loaded findable, and let those run that wait for nothing else."""
        for load in self.tiers.ended():
            arrival = self._arrivals.pop(load, None)
            if arrival is None:  # layerwise: its step has waited for it
                continue
            for key, _ in arrival.blocks:
                del self._coming[key]
            self._publish(arrival.blocks)
            for waiting in arrival.waiting:
                waiting.left -= 1
                waiting.allocation.loading = waiting.left > 0
                if not waiting.left:
                    waiting.note.critical_ns += load.ended_at - waiting.since

    def next_arrival(self) -> int | None:
        """When the next load that a request waits for ends, if no further transfer begins; None where there is none."""
        return min([self.tiers.load_ends_at(load) for load in self._arrivals], default=None)

    def stretched(self, duration_ns: int) -> int:
        """Nanoseconds of the scheduled step, which computes for `duration_ns`, with the loads that it follows."""
        if not self._layerwise:
            return duration_ns
        load_ns = max(self.tiers.load_ends_at(load) - load.begun_at for load, _ in self._layerwise)
        stretched = overlapped(load_ns, duration_ns, self._layers)
        for _, note in self._layerwise:
            note.critical_ns += stretched - duration_ns
        return stretched

    def take_note(self, request: int) -> LoadNote:
        """What tiers did for a request that has finished; forgets it."""
        return self.notes.pop(request)

    # -- as the pool's policy -----------------------------------------------------------------------------------------

    def append(self, allocation: BlockAllocation, start: int, stop: int, drafts: int = 0) -> bool:
        """Memory for tokens `[start, stop)`; what leaves the pool for it is written to a tier."""
        granted = self._blocks.append(allocation, start, stop, drafts)
        self.tiers.settle(self._now)
        return granted

    def repeat(self, allocations: list[BlockAllocation], starts: list[int], times: int) -> None:
        """Memory for several equal decode steps, all written out for at the first of them."""
        self._blocks.repeat(allocations, starts, times)
        self.tiers.settle(self._now)

    def chunk_end(self, plan: ReusePlan, start: int, stop: int, most: int, generated: int) -> int:
        """As the pool's policy."""
        return self._blocks.chunk_end(plan, start, stop, most, generated)

    def spare_steps(self, allocations: list[BlockAllocation]) -> int:
        """As the pool's policy."""
        return self._blocks.spare_steps(allocations)

    def insert(self, allocation: BlockAllocation, computed: int, now: int, cache_span: int = 0) -> None:
        """As the pool's policy."""
        self._blocks.insert(allocation, computed, now, cache_span)

    def finish(self, allocation: BlockAllocation, generated: int, now: int) -> None:
        """As the pool's policy."""
        self._blocks.finish(allocation, generated, now)

    def free(self, allocation: BlockAllocation, now: int) -> None:
        """As the pool's policy."""
        self._blocks.free(allocation, now)

    def need(self, request: Request) -> Need:
        """As the pool's policy: what a request holds is in the pool."""
        return self._blocks.need(request)

    def checkpoints(self, request: Request) -> list[int]:
        """As the pool's policy: states in the pool."""
        return self._blocks.checkpoints(request)

    def check(self) -> None:
        """Recount pool and tiers from scratch; slow, for tests."""
        self._blocks.check()
        self.tiers.check()


def _keys(blocks: Sequence[Block]) -> list[BlockKey]:
    """Keys of those blocks that have one."""
    return [block.key for block in blocks if block.key is not None]


def _blocks_but(plan: BlockPlan, absent: list[Block]) -> list[Block]:
    """Blocks of a plan that are in the pool."""
    out = set(absent)
    return [block for found in plan.found for block in found if block not in out]

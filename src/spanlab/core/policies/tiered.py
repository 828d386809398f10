"""A pool of hashed blocks over lower tiers of memory: their blocks are loaded where that is faster than computing.

The policy of the pool decides as ever, over a pool that also finds what lower tiers have. What is loaded gets memory of
the pool at once, and other requests find it when it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spanlab.core.policies.block_plan import BlockAllocation, BlockPlan
from spanlab.core.policies.block_pool import Block, BlockKey
from spanlab.core.policies.block_store import BlockStore
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.policies.over_tiers import OverTiers, PrefillSteps
from spanlab.core.request import Request
from spanlab.core.tiers.load import Load, LoadNote, overlapped
from spanlab.core.tiers.tiers import Tiers


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


class TieredPolicy(OverTiers[BlockPolicy]):
    """Offers requests what lower tiers have, and writes to those what the pool stores or gives up.

    `layers`  of the model, which a layerwise load follows
    """

    def __init__(self, blocks: BlockPolicy, tiers: Tiers, steps: PrefillSteps | None, layers: int) -> None:
        super().__init__(blocks, tiers, steps)
        self._layers = layers
        self._pool = blocks.store.pool
        self._pool.lower = self
        self._depth = 0  # how many tiers `find` looks at; none outside of `match`
        self._arrivals: dict[Load, _Arrival] = {}
        self._coming: dict[BlockKey, tuple[Block, Load]] = {}
        self._layerwise: list[tuple[Load, LoadNote]] = []  # begun by the step that is being scheduled

    @property
    def store(self) -> BlockStore:
        return self._policy.store

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
            return self._policy.match(request, now, generated)
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
        self._layerwise.clear()
        super().start_step(now)

    def allocate(self, plan: BlockPlan, now: int, generated: int = 0, drafts: int = 0) -> BlockAllocation | None:
        """Use what was found and let the rest of it be loaded; None, and no change, where the prompt would not fit."""
        if not self._policy.fits(plan, generated, drafts):
            return None
        absent, loads = self._absent(plan), self._joined(plan)
        keys = _keys([block for found in plan.found for block in found])
        there = _blocks_but(plan, absent) if absent else []
        note = self._note(plan.request)
        note.declined += plan.declined
        self._pool.use(there)  # so that what is loaded does not take their memory
        if absent:
            loads += self._begin(plan, absent, note, now)
        allocation = self._policy.allocate(plan, now, generated, drafts)
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
        load = self._load(keys, note, now)
        note.tokens += self._policy.blocks.size * sum(key.group == 0 for key in keys)
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


def _keys(blocks: Sequence[Block]) -> list[BlockKey]:
    """Keys of those blocks that have one."""
    return [block.key for block in blocks if block.key is not None]


def _blocks_but(plan: BlockPlan, absent: list[Block]) -> list[Block]:
    """Blocks of a plan that are in the pool."""
    out = set(absent)
    return [block for found in plan.found for block in found if block not in out]

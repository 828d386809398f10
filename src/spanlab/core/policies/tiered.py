"""A pool of hashed blocks over lower memory tiers, from which blocks are loaded where that is faster than computing.

The policy of the pool is unchanged, but lookups also return blocks of lower tiers. Memory of the pool is allocated when
a load begins, and the blocks are published when it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spanlab.core.policies.block_plan import BlockAllocation, BlockPlan
from spanlab.core.policies.block_pool import Block, BlockKey
from spanlab.core.policies.block_store import BlockStore
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.policies.over_tiers import OverTiers, PrefillSteps, WaitingRequest
from spanlab.core.request import Request
from spanlab.core.tiers.load import Load, LoadNote, overlapped
from spanlab.core.tiers.tiers import Tiers


@dataclass(slots=True, eq=False)
class _Arrival:
    """The blocks that a running load fills, and the requests that wait for them."""

    blocks: list[tuple[BlockKey, Block]]
    waiting: list[WaitingRequest] = field(default_factory=list)


class TieredPolicy(OverTiers[BlockPolicy]):
    """Loads blocks of lower tiers, and writes published or evicted blocks of the pool to them.

    `layers`  number of layers of the model, for layerwise loads
    """

    def __init__(self, blocks: BlockPolicy, tiers: Tiers, steps: PrefillSteps | None, layers: int) -> None:
        super().__init__(blocks, tiers, steps)
        self._layers = layers
        self._pool = blocks.store.pool
        self._pool.lower = self
        self._depth = 0  # number of tiers that `find` searches; 0 outside of `match`
        self._arrivals: dict[Load, _Arrival] = {}
        self._loading: dict[BlockKey, tuple[Block, Load]] = {}
        self._layerwise: list[tuple[Load, LoadNote]] = []  # begun in the current step

    @property
    def store(self) -> BlockStore:
        return self._policy.store

    # -- callbacks of the pool ----------------------------------------------------------------------------------------

    def find(self, key: BlockKey) -> Block | None:
        """Return a block that is being loaded, or a stand-in for one in a searched tier; None without one."""
        if not self._depth:
            return None
        loading = self._loading.get(key)
        if loading is not None:
            return loading[0] if loading[1].depth <= self._depth else None
        if self.tiers.holder(key, self._depth) is None:
            return None
        return Block(key.group, key.digest)

    def published(self, key: BlockKey) -> None:
        """Report a published block to the tiers."""
        self.tiers.published(key)

    def evicted(self, key: BlockKey) -> None:
        """Report an evicted block to the tiers."""
        self.tiers.evicted(key)

    # -- matching -----------------------------------------------------------------------------------------------------

    def match(self, request: Request, now: int, generated: int = 0) -> BlockPlan:
        """Return the reuse with loads from as many tiers as make the prompt ready soonest; read-only."""
        deepest = self._match_to_depth(len(self.tiers), request, now, generated)
        if self._steps is None or not (self._absent(deepest) or self._joined_loads(deepest)):
            return deepest
        plans = [self._match_to_depth(depth, request, now, generated) for depth in range(len(self.tiers))]
        ready = {plan: self._ready_ns(plan, self._steps, now, generated) for plan in (*plans, deepest)}
        chosen = min(ready, key=ready.__getitem__)
        chosen.declined = deepest.resume - chosen.resume
        return chosen

    def _match_to_depth(self, depth: int, request: Request, now: int, generated: int) -> BlockPlan:
        self._depth = depth
        try:
            return self._policy.match(request, now, generated)
        finally:
            self._depth = 0

    def _absent(self, plan: BlockPlan) -> list[Block]:
        """Return the stand-ins of a plan for blocks that are only in lower tiers, in order."""
        blocks = [block for group in plan.reused_blocks for block in group]
        return [block for block in blocks if block.key is not None and self._pool.find(*block.key) is not block]

    def _joined_loads(self, plan: BlockPlan) -> list[Load]:
        """Return the running loads of blocks of a plan."""
        loads = dict(self._loading.values())
        blocks = [block for group in plan.reused_blocks for block in group] if loads else []
        return list(dict.fromkeys([loads[block] for block in blocks if block in loads]))

    def _ready_ns(self, plan: BlockPlan, steps: PrefillSteps, now: int, generated: int) -> int:
        """Return the nanoseconds to load the blocks of a plan and compute its prompt, if nothing else ran."""
        tiers = self.tiers
        keys_by_tier = tiers.by_tier(_keys(self._absent(plan)))
        delays = [tiers.links[number].delay(tiers.bytes_of(number, keys)) for number, keys in keys_by_tier.items()]
        joined = [tiers.load_ends_at(load) - now for load in self._joined_loads(plan)]
        first, *later = steps(plan.resume, plan.prompt + generated)
        if tiers.are_layerwise(keys_by_tier):
            first = overlapped(max(delays, default=0), first, self._layers)
            delays = []
        return max([0, *delays, *joined]) + first + sum(later)

    # -- loading ------------------------------------------------------------------------------------------------------

    def start_step(self, now: int) -> None:
        """Complete transfers, and make requests ready whose blocks are loaded."""
        self._layerwise.clear()
        super().start_step(now)

    def allocate(self, plan: BlockPlan, now: int, generated: int = 0, drafts: int = 0) -> BlockAllocation | None:
        """Reuse matched blocks and load absent ones; None, and no change, where the prompt would not fit."""
        if not self._policy.fits(plan, generated, drafts):
            return None
        absent, loads = self._absent(plan), self._joined_loads(plan)
        keys = _keys([block for group in plan.reused_blocks for block in group])
        resident = _resident_blocks(plan, absent) if absent else []
        note = self._note(plan.request)
        note.declined += plan.declined
        self._pool.use(resident)  # so that the load cannot evict them
        if absent:
            loads += self._begin_load(plan, absent, note, now)
        allocation = self._policy.allocate(plan, now, generated, drafts)
        self._pool.free(resident)
        assert allocation is not None, "a plan that fits also fits after its loads are allocated"
        self._wait_for(loads, WaitingRequest(allocation, note, now, len(loads)))
        self.tiers.used(keys, now)
        self.tiers.settle(now)
        self._arrive()
        return allocation

    def _begin_load(self, plan: BlockPlan, absent: list[Block], note: LoadNote, now: int) -> list[Load]:
        """Load blocks into the pool, in place of their stand-ins; return the loads that the request waits for.

        The load holds a reference to its blocks until it has ended, in addition to that of the request.
        """
        keys = _keys(absent)
        load = self._load(keys, note, now)
        note.tokens += self._policy.blocks.size * sum(key.group == 0 for key in keys)
        allocated = self._pool.take(len(absent))
        filled = dict(zip(absent, allocated, strict=True))
        plan.reused_blocks = [[filled.get(block, block) for block in group] for group in plan.reused_blocks]
        blocks = list(zip(keys, allocated, strict=True))
        if load.layerwise:
            self._layerwise.append((load, note))
            self._publish(blocks)
            return []
        self._arrivals[load] = _Arrival(blocks)
        self._loading |= {key: (block, load) for key, block in blocks}
        return [load]

    def _publish(self, blocks: Sequence[tuple[BlockKey, Block]]) -> None:
        """Publish loaded blocks, and drop the reference of the load."""
        for key, block in blocks:
            self._pool.publish(key.group, [block], [key.digest])
        self._pool.free([block for _, block in reversed(blocks)])

    def _wait_for(self, loads: list[Load], waiting: WaitingRequest) -> None:
        """Make a request wait for running loads."""
        waiting.allocation.loading = bool(loads)
        for load in loads:
            self._arrivals[load].waiting.append(waiting)

    def _arrive(self) -> None:
        """Publish blocks of completed loads, and make requests ready that wait for no other load."""
        for load in self.tiers.ended():
            arrival = self._arrivals.pop(load, None)
            if arrival is None:  # layerwise: the step was extended by it
                continue
            for key, _ in arrival.blocks:
                del self._loading[key]
            self._publish(arrival.blocks)
            for waiting in arrival.waiting:
                waiting.loaded(load)

    def next_arrival(self) -> int | None:
        return min([self.tiers.load_ends_at(load) for load in self._arrivals], default=None)

    def step_duration(self, duration_ns: int) -> int:
        """Return the nanoseconds of the scheduled step, which computes for `duration_ns`, with its layerwise loads."""
        if not self._layerwise:
            return duration_ns
        load_ns = max(self.tiers.load_ends_at(load) - load.begun_at for load, _ in self._layerwise)
        total_ns = overlapped(load_ns, duration_ns, self._layers)
        for _, note in self._layerwise:
            note.critical_ns += total_ns - duration_ns
        return total_ns


def _keys(blocks: Sequence[Block]) -> list[BlockKey]:
    """Return the keys of the published blocks."""
    return [block.key for block in blocks if block.key is not None]


def _resident_blocks(plan: BlockPlan, absent: list[Block]) -> list[Block]:
    """Return the blocks of a plan that are in the pool."""
    stand_ins = set(absent)
    return [block for group in plan.reused_blocks for block in group if block not in stand_ins]

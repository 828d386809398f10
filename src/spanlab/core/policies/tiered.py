"""A pool of hashed blocks over lower memory tiers, from which blocks are loaded where that is
faster than computing.

The policy of the pool is unchanged, but lookups also return blocks of lower tiers. Memory of the
pool is allocated when a load begins, and the blocks are published when it has ended.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Generic, TypeVar

from spanlab.core.eviction.orders import PathNames
from spanlab.core.plan import DecodeBatch, Need, ReusePlan, TreeAllocation, combine_plans
from spanlab.core.policies.block_pool import BlockKey, BlockStore, Prefix, Run, single_blocks
from spanlab.core.policies.blocks import BlockAllocation, BlockPlan, BlockPolicy
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.protocol import BeforeChange, unnoticed
from spanlab.core.request import Request
from spanlab.core.rules import ReuseRules
from spanlab.core.store import Store
from spanlab.core.tiers import Key, Load, LoadNote, Tiers, overlapped
from spanlab.records import NS, Record, RunRow

# ------------------------------------------------------------------------------
# The base of policies over lower memory tiers: it delegates to the policy of device memory, and
# manages loads.
# ------------------------------------------------------------------------------

#: Nanoseconds of each step of computing prompt tokens [start, stop) alone.
PrefillSteps = Callable[[int, int], Sequence[int]]


P = TypeVar("P", bound=BlockPolicy | TreePolicy)


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request that waits for `num_loads` loads, since the time `since` in nanoseconds."""

    allocation: Any
    note: LoadNote
    since: int
    num_loads: int = 1

    def loaded(self, load: Load) -> None:
        """Count a load that has ended; after the last one the request is ready to run."""
        self.num_loads -= 1
        if not self.num_loads:
            self.allocation.loading = False
            self.note.critical_ns += load.ended_at - self.since


class OverTiers(ABC, Generic[P]):
    """The parts of `Policy` that are common to all tiers; evicted entries are written to a tier.

    `steps`  time of computing; None: everything that can be loaded is loaded
    `notes`  transfers for each request, by its id, until `take_note`
    """

    def __init__(self, policy: P, tiers: Tiers, steps: PrefillSteps | None) -> None:
        self._policy, self.tiers, self._steps = policy, tiers, steps
        self._now = 0
        self.notes: dict[int, LoadNote] = {}
        self.stores_when_scheduled = policy.stores_when_scheduled

    @property
    def rules(self) -> ReuseRules:
        return self._policy.rules

    # -- loading -----------------------------------------------------------------------------------

    def start_step(self, now: int) -> None:
        """Complete transfers, and make requests ready whose loads have ended."""
        self._now = now
        self._policy.start_step(now)
        self.tiers.advance(now)
        self._arrive()

    @abstractmethod
    def _arrive(self) -> None:
        """Make requests ready to run whose loads have ended."""

    @abstractmethod
    def next_arrival(self) -> int | None:
        """Return when the next awaited load ends, if no further transfer begins; None without
        one."""

    def step_duration(self, duration_ns: int) -> int:
        """Return the nanoseconds of the scheduled step, which computes for `duration_ns`, with the
        loads it follows."""
        return duration_ns

    def _note(self, request: Request) -> LoadNote:
        """Return the note of a request, which exists from its first admission on."""
        return self.notes.setdefault(request.id, LoadNote([0] * len(self.tiers)))

    def _load(self, keys: Sequence[Key], note: LoadNote, now: int) -> Load:
        """Begin to load entries, and record their bytes."""
        load = self.tiers.load(keys, now)
        for number, num_bytes in load.num_bytes.items():
            note.bytes[number] += num_bytes
        return load

    def take_note(self, request: int) -> LoadNote:
        """Return and forget the note of a finished request."""
        return self.notes.pop(request)

    # -- delegation to the policy of the device ----------------------------------------------------

    def append(self, allocation: Any, start: int, stop: int, drafts: int = 0) -> bool:
        """Allocate memory for tokens `[start, stop)`; entries evicted for it are written to a
        tier."""
        granted = self._policy.append(allocation, start, stop, drafts)
        self.tiers.settle(self._now)
        return granted

    def repeat(self, batch: DecodeBatch, times: int, before: BeforeChange = unnoticed) -> None:
        """Allocate memory for several equal decode steps; writes to tiers begin at the first of
        them."""
        self._policy.repeat(batch, times, before)
        self.tiers.settle(self._now)

    def chunk_end(self, plan: ReusePlan, start: int, stop: int, most: int, generated: int) -> int:
        """Delegate to the policy."""
        return self._policy.chunk_end(plan, start, stop, most, generated)

    def spare_steps(self, batch: DecodeBatch) -> int:
        """Delegate to the policy."""
        return self._policy.spare_steps(batch)

    def futile_steps(self, request: Request, batch: DecodeBatch) -> int:
        """Delegate to the policy."""
        return self._policy.futile_steps(request, batch)

    def insert(self, allocation: Any, computed: int, now: int, cache_span: int = 0) -> None:
        """Delegate to the policy."""
        self._policy.insert(allocation, computed, now, cache_span)

    def finish(self, allocation: Any, generated: int, now: int) -> None:
        """Delegate to the policy."""
        self._policy.finish(allocation, generated, now)

    def free(self, allocation: Any, now: int) -> None:
        """Delegate to the policy."""
        self._policy.free(allocation, now)

    def need(self, request: Request) -> Need:
        """Delegate to the policy: the memory of a request is on the device."""
        return self._policy.need(request)

    def checkpoints(self, request: Request) -> list[int]:
        """Delegate to the policy: return states on the device."""
        return self._policy.checkpoints(request)

    def check(self) -> None:
        """Verify device and tiers by recounting; slow, for tests."""
        self._policy.check()
        self.tiers.check()


@dataclass(slots=True, eq=False)
class _Arrival:
    """The blocks that a running load fills, and the requests that wait for them."""

    blocks: list[tuple[BlockKey, Run]]
    waiting: list[WaitingRequest] = field(default_factory=list)


class TieredPolicy(OverTiers[BlockPolicy]):
    """Loads blocks of lower tiers, and writes published or evicted blocks of the pool to them.

    `layers`  number of layers of the model, for layerwise loads
    """

    def __init__(
        self, blocks: BlockPolicy, tiers: Tiers, steps: PrefillSteps | None, layers: int
    ) -> None:
        super().__init__(blocks, tiers, steps)
        self._layers = layers
        self._pool = blocks.store.pool
        self._pool.lower = self
        self._depth = 0  # number of tiers that `find` searches; 0 outside of `match`
        self._arrivals: dict[Load, _Arrival] = {}
        self._loading: dict[BlockKey, tuple[Run, Load]] = {}
        self._layerwise: list[tuple[Load, LoadNote]] = []  # begun in the current step

    @property
    def store(self) -> BlockStore:
        return self._policy.store

    # -- callbacks of the pool ---------------------------------------------------------------------

    def find(self, key: BlockKey) -> Run | None:
        """Return a block that is being loaded, or a stand-in for one in a searched tier; None
        without one."""
        if not self._depth:
            return None
        loading = self._loading.get(key)
        if loading is not None:
            return loading[0] if loading[1].depth <= self._depth else None
        if self.tiers.holder(key, self._depth) is None:
            return None
        return Run(key.group, array("Q", (key.digest,)), users=0)

    def published(self, key: BlockKey) -> None:
        """Report a published block to the tiers."""
        self.tiers.published(key)

    def evicted(self, key: BlockKey) -> None:
        """Report an evicted block to the tiers."""
        self.tiers.evicted(key)

    # -- matching ----------------------------------------------------------------------------------

    def match(self, request: Request, now: int, generated: int = 0) -> BlockPlan:
        """Return the reuse with loads from as many tiers as make the prompt ready soonest;
        read-only."""
        deepest = self._match_to_depth(len(self.tiers), request, now, generated)
        if self._steps is None or not (self._absent(deepest) or self._joined_loads(deepest)):
            return deepest
        plans = [
            self._match_to_depth(depth, request, now, generated) for depth in range(len(self.tiers))
        ]
        ready = {
            plan: self._ready_ns(plan, self._steps, now, generated) for plan in (*plans, deepest)
        }
        chosen = min(ready, key=ready.__getitem__)
        chosen.declined = deepest.resume - chosen.resume
        return chosen

    def _match_to_depth(self, depth: int, request: Request, now: int, generated: int) -> BlockPlan:
        self._depth = depth
        try:
            return self._policy.match(request, now, generated)
        finally:
            self._depth = 0

    def _absent(self, plan: BlockPlan) -> list[Run]:
        """Return the stand-ins of a plan for blocks that are only in lower tiers, in order."""
        return [block for block in _blocks_of(plan) if block.key is not None and not block.stored]

    def _joined_loads(self, plan: BlockPlan) -> list[Load]:
        """Return the running loads of blocks of a plan."""
        loads = dict(self._loading.values())
        blocks = _blocks_of(plan) if loads else []
        return list(dict.fromkeys([loads[block] for block in blocks if block in loads]))

    def _ready_ns(self, plan: BlockPlan, steps: PrefillSteps, now: int, generated: int) -> int:
        """Return the nanoseconds to load the blocks of a plan and compute its prompt, if nothing
        else ran."""
        tiers = self.tiers
        keys_by_tier = tiers.by_tier(_keys(self._absent(plan)))
        delays = [
            tiers.links[number].delay(tiers.bytes_of(number, keys))
            for number, keys in keys_by_tier.items()
        ]
        joined = [tiers.load_ends_at(load) - now for load in self._joined_loads(plan)]
        first, *later = steps(plan.resume, plan.prompt + generated)
        if tiers.are_layerwise(keys_by_tier):
            first = overlapped(max(delays, default=0), first, self._layers)
            delays = []
        return max([0, *delays, *joined]) + first + sum(later)

    # -- loading -----------------------------------------------------------------------------------

    def start_step(self, now: int) -> None:
        """Complete transfers, and make requests ready whose blocks are loaded."""
        self._layerwise.clear()
        super().start_step(now)

    def allocate(
        self, plan: BlockPlan, now: int, generated: int = 0, drafts: int = 0
    ) -> BlockAllocation | None:
        """Reuse matched blocks and load absent ones; None, and no change, where the prompt would
        not fit."""
        if not self._policy.fits(plan, generated, drafts):
            return None
        absent, loads = self._absent(plan), self._joined_loads(plan)
        blocks, stand_ins = _blocks_of(plan), set(absent)
        keys = _keys(blocks)
        resident = [block for block in blocks if block not in stand_ins] if absent else []
        note = self._note(plan.request)
        note.declined += plan.declined
        self._pool.use(single_blocks(resident))  # so that the load cannot evict them
        if absent:
            loads += self._begin_load(plan, absent, note, now)
        allocation = self._policy.allocate(plan, now, generated, drafts)
        self._pool.free(resident)
        assert allocation is not None, "a plan that fits also fits after its loads are allocated"
        waiting = WaitingRequest(allocation, note, now, len(loads))
        waiting.allocation.loading = bool(loads)
        for load in loads:
            self._arrivals[load].waiting.append(waiting)
        self.tiers.used(keys, now)
        self.tiers.settle(now)
        self._arrive()
        return allocation

    def _begin_load(
        self, plan: BlockPlan, absent: list[Run], note: LoadNote, now: int
    ) -> list[Load]:
        """Load blocks into the pool, in place of their stand-ins; return the loads that the request
        waits for.

        The load holds a reference to its blocks until it has ended, in addition to that of the
        request.
        """
        keys = _keys(absent)
        load = self._load(keys, note, now)
        note.tokens += self._policy.blocks.size * sum(key.group == 0 for key in keys)
        self._pool.take(len(absent))
        allocated = [Run(block.group, block.digests) for block in absent]
        filled = dict(zip(absent, allocated, strict=True))
        plan.reused_blocks = [
            Prefix([filled.get(block, block) for block in reused.runs], reused.count)
            for reused in plan.reused_blocks
        ]
        blocks = list(zip(keys, allocated, strict=True))
        if load.layerwise:
            self._layerwise.append((load, note))
            self._publish(blocks)
            return []
        self._arrivals[load] = _Arrival(blocks)
        self._loading |= {key: (block, load) for key, block in blocks}
        return [load]

    def _publish(self, blocks: Sequence[tuple[BlockKey, Run]]) -> None:
        """Publish loaded blocks, and drop the reference of the load."""
        for key, block in blocks:
            self._pool.publish_single(key.group, block, key.digest)
        self._pool.free([block for _, block in reversed(blocks)])

    def _arrive(self) -> None:
        """Publish blocks of completed loads, and make requests ready that wait for no other
        load."""
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
        """Return the nanoseconds of the scheduled step, which computes for `duration_ns`, with its
        layerwise loads."""
        if not self._layerwise:
            return duration_ns
        load_ns = max(self.tiers.load_ends_at(load) - load.begun_at for load, _ in self._layerwise)
        total_ns = overlapped(load_ns, duration_ns, self._layers)
        for _, note in self._layerwise:
            note.critical_ns += total_ns - duration_ns
        return total_ns


def _keys(blocks: Sequence[Run]) -> list[BlockKey]:
    """Return the keys of the published blocks."""
    return [block.key for block in blocks if block.key is not None]


def _blocks_of(plan: BlockPlan) -> list[Run]:
    return [block for reused in plan.reused_blocks for block in reused.runs]


# ------------------------------------------------------------------------------
# A tree policy over lower memory tiers for states: an evicted state is loaded back where its KV
# is still stored.
#
# The tree policy itself is unchanged. States that it stores or evicts are written to the tiers
# under the digest of their prefix, so that lookups do not depend on later splits of edges. A
# request with a pending load holds memory but does not run.
# ------------------------------------------------------------------------------


class BackfilledPolicy(OverTiers[TreePolicy]):
    """Resumes prompts from states of lower tiers that are deeper than those of the tree, within its
    KV."""

    def __init__(self, tree: TreePolicy, tiers: Tiers, steps: PrefillSteps | None) -> None:
        super().__init__(tree, tiers, steps)
        self._names = PathNames()
        tree.store.tree.watchers.append(self._names)
        tree.store.on_stored = lambda state: tiers.published(self._names.of_state(state))
        tree.store.before_drop = lambda state: tiers.evicted(self._names.of_state(state))
        self._waiting: dict[Load, WaitingRequest] = {}

    @property
    def store(self) -> Store:
        return self._policy.store

    # -- matching ----------------------------------------------------------------------------------

    def match(self, request: Request, now: int, generated: int = 0) -> ReusePlan:
        """Return the reuse of a prompt, with the deepest state of a tier where loading it is
        faster."""
        plan = self._policy.match(request, now, generated)
        position = self._deepest(plan)
        if position is None:
            return plan
        deeper = _resumed_at(plan, position)
        if self._steps is not None and self._ready_ns(deeper, now, generated) >= self._computed_ns(
            plan, generated
        ):
            return plan
        return deeper

    def _deepest(self, plan: ReusePlan) -> int | None:
        """Return the position of a tier's deepest state beyond the plan's state, within its KV;
        None without one."""
        span_plan = plan.cache_spans[0]
        limit = min(span_plan.matched, plan.prompt - (not self.rules.last_token))
        for node in span_plan.match_node.path():
            if node.depth <= span_plan.resume:
                return None
            for position in reversed(node.lost[: bisect_right(node.lost, limit)]):
                if position <= span_plan.resume:
                    continue
                name = self._names.of_position(node, position)
                if self.tiers.holder(name, len(self.tiers)) is not None:
                    return position
        return None

    def _key(self, plan: ReusePlan) -> bytes:
        """Return the name of the state from which a plan resumes."""
        span_plan = plan.cache_spans[0]
        node = span_plan.match_node
        while node.start >= span_plan.resume:
            assert node.parent is not None, "a state follows at least one token"
            node = node.parent
        return self._names.of_position(node, span_plan.resume)

    def _computed_ns(self, plan: ReusePlan, generated: int) -> int:
        assert self._steps is not None, "called only where loading and computing are compared"
        return sum(self._steps(plan.resume, plan.prompt + generated))

    def _ready_ns(self, plan: ReusePlan, now: int, generated: int) -> int:
        """Return the nanoseconds to load the state of a plan and compute its prompt, if nothing
        else ran."""
        keys_by_tier = self.tiers.by_tier([self._key(plan)])
        delays = [
            self.tiers.links[number].delay(self.tiers.bytes_of(number, keys))
            for number, keys in keys_by_tier.items()
        ]
        return max(delays) + self._computed_ns(plan, generated)

    # -- loading -----------------------------------------------------------------------------------

    def allocate(
        self, plan: ReusePlan, now: int, generated: int = 0, drafts: int = 0
    ) -> TreeAllocation | None:
        """Allocate as the tree policy, and load the state at the plan's resume position if the tree
        has none."""
        span_plan = plan.cache_spans[0]
        loads = span_plan.resume > 0 and span_plan.resume_state is None
        key = self._key(plan) if loads else b""
        allocation = self._policy.allocate(plan, now, generated, drafts)
        if allocation is None:
            return None
        note = self._note(plan.request)
        if loads:
            self._begin_load(key, allocation, note, now)
        self.tiers.settle(now)
        self._arrive()
        return allocation

    def _begin_load(self, key: bytes, allocation: TreeAllocation, note: LoadNote, now: int) -> None:
        """Begin to load a state; it is stored again with the tokens of its request, where memory
        allows."""
        load = self._load([key], note, now)
        span_plan, store = allocation.plan.cache_spans[0], self.store
        nearest = span_plan.match_node.deepest_state(span_plan.resume)
        note.tokens += span_plan.resume - (0 if nearest is None else nearest.position)
        if store.spare_state_bytes() >= store.state_bytes and store.reserve(0, store.state_bytes):
            insort(allocation.captures, span_plan.resume)
            allocation.state_bytes += store.state_bytes
        allocation.loading = True
        self._waiting[load] = WaitingRequest(allocation, note, now)

    def _arrive(self) -> None:
        """Make requests with completed loads ready to run."""
        for load in self.tiers.ended():
            self._waiting.pop(load).loaded(load)

    def next_arrival(self) -> int | None:
        return min([self.tiers.load_ends_at(load) for load in self._waiting], default=None)


def _resumed_at(plan: ReusePlan, position: int) -> ReusePlan:
    """Return the plan with its resume point moved to a position whose state was evicted."""
    span_plan = plan.cache_spans[0]
    node = span_plan.match_node
    while node.depth > position:
        assert node.parent is not None, "the root ends at zero"
        node = node.parent
    losses = span_plan.losses._replace(
        state_evicted=span_plan.losses.state_evicted - (position - span_plan.resume)
    )
    deeper = span_plan._replace(
        resume=position,
        resumable=max(position, span_plan.resumable),
        losses=losses,
        resume_node=node,
        resume_state=None,
    )
    return combine_plans(plan.request, plan.prompt, (deeper,), plan.repair)


# ------------------------------------------------------------------------------
# The rows of runs with lower tiers: loads of each request, and transfers of each tier.
# ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TieredRecord(Record):
    """A record with what tiers did for the request. `reused_tokens` counts loaded tokens too.

    loaded_tokens      that came from lower tiers, in all its admissions
    declined_tokens    that lower tiers had and that it computed, because that was faster
    critical_load_s    time by which its first token was later for its loads
    loaded_bytes       by tier
    """

    loaded_tokens: int
    declined_tokens: int
    critical_load_s: float
    loaded_bytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class TierRow:
    """What one tier held and moved in one run; a block counts once for each time it was written or
    loaded.

    `small_loaded_blocks`      loaded blocks that were quantised
    `taken_blocks`             that a load took out of an exclusive tier
    `refused_blocks`           that were not written, because all that could leave was in use
    `mean_transfers`           in flight, mean over time
    """

    name: str
    capacity_bytes: int
    resident_peak_bytes: int
    loaded_bytes: int
    written_bytes: int
    loaded_blocks: int
    small_loaded_blocks: int
    taken_blocks: int
    written_blocks: int
    quantised_blocks: int
    demoted_blocks: int
    evicted_blocks: int
    refused_blocks: int
    mean_transfers: float


@dataclass(frozen=True, slots=True)
class TieredRunRow(RunRow):
    """A run with what its tiers did."""

    tiers: list[TierRow] = field(default_factory=list)


def tiered_record(record: Record, policy: OverTiers[Any]) -> TieredRecord:
    """Return a finished request's record with its loads."""
    note = policy.take_note(record.request_id)
    loaded = {
        tier.name: num_bytes for tier, num_bytes in zip(policy.tiers.tiers, note.bytes, strict=True)
    }
    return TieredRecord(
        **asdict(record),
        loaded_tokens=note.tokens,
        declined_tokens=note.declined,
        critical_load_s=note.critical_ns * NS,
        loaded_bytes=loaded,
    )


def tiered_row(row: RunRow, policy: OverTiers[Any]) -> TieredRunRow:
    """Return the row of a finished run with the transfers of its tiers."""
    shared = {column.name: getattr(row, column.name) for column in fields(row)}
    end = round(row.makespan_s / NS)
    tiers = [
        TierRow(
            name=tier.name,
            capacity_bytes=tier.capacity,
            resident_peak_bytes=tier.peak,
            loaded_bytes=policy.tiers.loaded_bytes[number],
            written_bytes=tier.counts.written * tier.block_bytes,
            loaded_blocks=tier.counts.loaded,
            small_loaded_blocks=tier.counts.loaded_small,
            taken_blocks=tier.counts.taken,
            written_blocks=tier.counts.written,
            quantised_blocks=tier.counts.quantised,
            demoted_blocks=tier.counts.demoted,
            evicted_blocks=tier.counts.evicted,
            refused_blocks=tier.counts.refused,
            mean_transfers=policy.tiers.links[number].mean_in_flight(end),
        )
        for number, tier in enumerate(policy.tiers.tiers)
    ]
    return TieredRunRow(**shared, tiers=tiers)

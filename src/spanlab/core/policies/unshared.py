"""The block pool of `blocks` for requests of which only lengths are known: no two share a token, so blocks are counted.

Decisions are those of `BlockPolicy` on prompts without a common token, at a constant cost per request and step: a
preempted request still finds what is left of its own blocks. Without prefix caching it finds nothing, and a hybrid's
request holds one state from its first step to its last, as in vLLM 0.32.0 with `mamba_cache_mode=none`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from spanlab.core.need import Need
from spanlab.core.policies.block_groups import blocks_of
from spanlab.core.repair import Repair
from spanlab.core.request import Request
from spanlab.core.reuse import Losses, ReusePlan
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.work import PrefillRange, Work


class CountedBlocks:
    """Blocks of one size: those in use, blank ones, and full ones of requests that left, first in, first out.

    A request's last block leaves first, so what is left of it is always its beginning.
    """

    state_bytes = 0

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self._blank = num_blocks
        self._left: OrderedDict[int, int] = OrderedDict()  # full blocks by request, in order of leaving
        self.num_left = self.num_used_full = 0
        self._published = self._evicted = 0

    @property
    def num_free(self) -> int:
        """Blocks that no request uses."""
        return self._blank + self.num_left

    @property
    def kv_cached(self) -> int:
        """Bytes of full blocks."""
        return (self.num_left + self.num_used_full) * self.block_bytes

    @property
    def state_cached(self) -> int:
        """Nothing: no state is ever stored."""
        return 0

    @property
    def inserted_bytes(self) -> int:
        """Bytes of blocks that were ever full."""
        return self._published * self.block_bytes

    @property
    def evicted_bytes(self) -> int:
        """Bytes of full blocks whose memory was taken for others."""
        return self._evicted * self.block_bytes

    def left_of(self, request: int) -> int:
        """Full blocks that are left of a request."""
        return self._left.get(request, 0)

    def use(self, request: int, blocks: int) -> None:
        """Give a request its first full blocks back; what else is left of it becomes blank."""
        left = self._left.pop(request, 0)
        self.num_left -= left
        self._blank += left - blocks
        self.num_used_full += blocks

    def take(self, blocks: int) -> None:
        """Hand out blocks: blank ones, then those of the request that left first."""
        assert blocks <= self.num_free, "more blocks were taken than are free"
        blank = min(blocks, self._blank)
        self._blank -= blank
        blocks -= blank
        while blocks:
            request, left = next(iter(self._left.items()))
            taken = min(left, blocks)
            if taken == left:
                del self._left[request]
            else:
                self._left[request] = left - taken
            self.num_left -= taken
            self._evicted += taken
            blocks -= taken

    def fill(self, blocks: int) -> None:
        """Note that blocks in use got full."""
        self.num_used_full += blocks
        self._published += blocks

    def free(self, request: int, held: int, full: int) -> None:
        """Take back all blocks of a request, of which the first are full."""
        self._blank += held - full
        self.num_used_full -= full
        self.num_left += full
        if full:
            self._left[request] = full


@dataclass(slots=True, eq=False)
class CountedAllocation:
    """What a running request holds: blocks for tokens `[0, stop)`, `full` of them full, and those of its state."""

    plan: ReusePlan
    work: tuple[Work, ...]
    captures: list[int]
    held: int
    full: int
    stop: int
    states: int = 0
    captured: int = 0
    captured_maps: int = 0
    loading: bool = False

    @property
    def loads_state(self) -> bool:
        """No state is ever stored."""
        return False


class UnsharedPolicy:
    """Gives every step the blocks that it writes; only a preempted request finds anything, its own beginning."""

    retries_each_step = False  # decoding only takes blocks, so a refusal lasts until a request leaves
    stores_when_scheduled = True

    def __init__(self, size: int, store: CountedBlocks, *, states: int = 0, caches: bool = True) -> None:
        """`states`: blocks of one request's state; `caches`: whether full blocks outlive their request."""
        assert not (states and caches), "the states of a cache lie on block boundaries, and BlockPolicy keeps them"
        self.size, self.store = size, store
        self._states, self._caches = states, caches
        self.rules = ReuseRules()

    def start_step(self, now: int) -> None:
        """Nothing changes between steps."""

    def match(self, request: Request, now: int, generated: int = 0) -> ReusePlan:
        """What is left of the request's own blocks; at least one token is computed."""
        prompt = request.num_tokens
        found = self.store.left_of(request.id)
        resume = min(found, (prompt + generated - 1) // self.size) * self.size
        losses = Losses(max(0, prompt - resume), 0, 0, 0, 0, 0, 0, 0)
        sizes = found * self.size, found * self.size, resume, resume
        return ReusePlan(request, prompt, (), Repair(), *sizes, losses)

    def allocate(self, plan: ReusePlan, now: int, generated: int = 0, drafts: int = 0) -> CountedAllocation | None:
        """Use what was found; None, and no change, where the whole prompt and drafts behind it would not fit."""
        length = plan.prompt + generated
        if blocks_of(length + drafts, self.size) + self._states > self.store.num_free:
            return None
        found = plan.resume // self.size
        self.store.use(plan.request.id, found)
        return CountedAllocation(plan, (PrefillRange(0, plan.resume, length),), [], found, found, plan.resume)

    def chunk_end(self, plan: ReusePlan, start: int, stop: int, most: int, generated: int) -> int:
        """A chunk may end anywhere."""
        return stop

    def append(self, allocation: CountedAllocation, start: int, stop: int, drafts: int = 0) -> bool:
        """Give a request the blocks of tokens `[start, stop)` and of drafts; False where there are not enough."""
        new, states = blocks_of(stop + drafts, self.size) - allocation.held, self._states - allocation.states
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
            allocation.held += new
        full = stop // self.size
        if full > allocation.full and self._caches:
            self.store.fill(full - allocation.full)
            allocation.full = full
        allocation.stop = stop

    def repeat(self, allocations: list[CountedAllocation], starts: list[int], times: int) -> None:
        """Extend each allocation by `times` tokens."""
        for allocation, start in zip(allocations, starts, strict=True):
            stop = start + times
            self._extend(allocation, blocks_of(stop, self.size) - allocation.held, stop)

    def spare_steps(self, allocations: list[CountedAllocation]) -> int:
        """Decode steps for which all of `allocations` find room, to the last one.

        Each takes a block when its last one is full, and then one per block size: after `rounds` of those, the
        remaining blocks go to the requests whose last block is fullest.
        """
        rounds, more = divmod(self.store.num_free, len(allocations))
        room = sorted([one.held * self.size - one.stop for one in allocations])
        return rounds * self.size + room[more]

    def insert(self, allocation: CountedAllocation, computed: int, now: int, cache_span: int = 0) -> None:
        """Nothing more is remembered: blocks count as full from the moment they are scheduled."""

    def finish(self, allocation: CountedAllocation, generated: int, now: int) -> None:
        """No other request knows the output."""

    def free(self, allocation: CountedAllocation, now: int) -> None:
        """Free every block: the request has finished, or has been preempted."""
        self.store.free(allocation.plan.request.id, allocation.held + allocation.states, allocation.full)
        allocation.held = allocation.full = allocation.states = 0

    def need(self, request: Request) -> Need:
        """What one request may hold by itself: whole blocks, and the null block of the engine's pool."""
        tokens, block_bytes, null_block = request.num_tokens + request.output_len - 1, self.store.block_bytes, 1
        kv = (blocks_of(tokens, self.size) + null_block) * block_bytes
        return Need(tokens, 0, 1, kv, self._states * block_bytes)

    def checkpoints(self, request: Request) -> list[int]:
        """No states."""
        return []

"""A tree of prefixes over lower tiers of memory that hold states: where KV has stayed, its state is loaded back.

The tree decides as ever. States that it stores or gives up are written to the tiers by what they have read, so that one
is found again whatever edges were cut since. A request whose state is on its way holds memory and no seat.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass

from spanlab.core.eviction.path_names import PathNames
from spanlab.core.policies.over_tiers import OverTiers, PrefillSteps
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request
from spanlab.core.reuse import ReusePlan, TreeAllocation, gather
from spanlab.core.store import Store
from spanlab.core.tiers.load import Load, LoadNote
from spanlab.core.tiers.tiers import Tiers
from spanlab.core.tree import Node, State


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that cannot run before its state is there."""

    allocation: TreeAllocation
    note: LoadNote
    since: int


class BackfilledPolicy(OverTiers[TreePolicy]):
    """Offers prompts the states of lower tiers that stand deeper than those of the tree, within its KV."""

    def __init__(self, tree: TreePolicy, tiers: Tiers, steps: PrefillSteps | None) -> None:
        super().__init__(tree, tiers, steps)
        self._names = PathNames()
        tree.store.tree.watchers.append(self._names)
        tree.store.on_stored, tree.store.on_leaving = self._stored, self._leaving
        self._waiting: dict[Load, _Waiting] = {}

    @property
    def store(self) -> Store:
        return self._policy.store

    # -- what the store tells -----------------------------------------------------------------------------------------

    def _stored(self, state: State) -> None:
        self.tiers.published(self._names.of_state(state))

    def _leaving(self, state: State) -> None:
        self.tiers.evicted(self._names.of_state(state))

    # -- matching -----------------------------------------------------------------------------------------------------

    def match(self, request: Request, now: int, generated: int = 0) -> ReusePlan:
        """How much can be reused: with the deepest state of a tier where that makes the prompt ready sooner."""
        plan = self._policy.match(request, now, generated)
        position = self._deepest(plan)
        if position is None:
            return plan
        deeper = _resumed_at(plan, position)
        if self._steps is not None and self._ready_ns(deeper, now, generated) >= self._computed_ns(plan, generated):
            return plan
        return deeper

    def _deepest(self, plan: ReusePlan) -> int | None:
        """Where the deepest state of a tier stands, beyond the plan's own and within its KV; None: nowhere."""
        part = plan.cache_spans[0]
        limit = min(part.matched, plan.prompt - (not self.rules.last_token))
        for node, position in _lost(part.match_node, part.resume, limit):
            if self.tiers.holder(self._names.of_position(node, position), len(self.tiers)) is not None:
                return position
        return None

    def _key(self, plan: ReusePlan) -> bytes:
        """The name of the state that a plan resumes from."""
        part = plan.cache_spans[0]
        node = part.match_node
        while node.start >= part.resume:
            assert node.parent is not None, "a state stands behind a token"
            node = node.parent
        return self._names.of_position(node, part.resume)

    def _computed_ns(self, plan: ReusePlan, generated: int) -> int:
        assert self._steps is not None, "asked where loading and computing are compared"
        return sum(self._steps(plan.resume, plan.prompt + generated))

    def _ready_ns(self, plan: ReusePlan, now: int, generated: int) -> int:
        """Nanoseconds until the prompt of a plan that loads a state would be computed if nothing else ran."""
        parts = self.tiers.by_tier([self._key(plan)])
        delays = [self.tiers.links[number].delay(self.tiers.bytes_of(number, keys)) for number, keys in parts.items()]
        return max(delays) + self._computed_ns(plan, generated)

    # -- loading ------------------------------------------------------------------------------------------------------

    def allocate(self, plan: ReusePlan, now: int, generated: int = 0, drafts: int = 0) -> TreeAllocation | None:
        """As the tree, and load the state that the plan resumes from where the tree has none there."""
        part = plan.cache_spans[0]
        loads = part.resume > 0 and part.resume_state is None
        key = self._key(plan) if loads else b""
        allocation = self._policy.allocate(plan, now, generated, drafts)
        if allocation is None:
            return None
        note = self._note(plan.request)
        if loads:
            self._begin(key, allocation, note, now)
        self.tiers.settle(now)
        self._arrive()
        return allocation

    def _begin(self, key: bytes, allocation: TreeAllocation, note: LoadNote, now: int) -> None:
        """Begin to load a state; it is stored again with what its request computes, where there is room."""
        load = self._load([key], note, now)
        part, store = allocation.plan.cache_spans[0], self.store
        nearest = part.match_node.deepest_state(part.resume)
        note.tokens += part.resume - (0 if nearest is None else nearest.position)
        if store.spare_state_bytes() >= store.state_bytes and store.reserve(0, store.state_bytes):
            insort(allocation.captures, part.resume)
            allocation.state_bytes += store.state_bytes
        allocation.loading = True
        self._waiting[load] = _Waiting(allocation, note, now)

    def _arrive(self) -> None:
        """Let requests run whose state is there."""
        for load in self.tiers.ended():
            waiting = self._waiting.pop(load)
            waiting.allocation.loading = False
            waiting.note.critical_ns += load.ended_at - waiting.since

    def next_arrival(self) -> int | None:
        """When the next load ends, if no further transfer begins; None where there is none."""
        return min([self.tiers.load_ends_at(load) for load in self._waiting], default=None)

    def stretched(self, duration_ns: int) -> int:
        """A step waits for no load: requests do, before they run."""
        return duration_ns


def _lost(node: Node, above: int, limit: int) -> Iterator[tuple[Node, int]]:
    """Positions of a path in (above, limit] that have lost their state, with their nodes; deepest first."""
    for step in node.path():
        if step.depth <= above:
            return
        for position in reversed(step.lost[: bisect_right(step.lost, limit)]):
            if position > above:
                yield step, position


def _resumed_at(plan: ReusePlan, position: int) -> ReusePlan:
    """The same plan where computation restarts at a position that has lost its state."""
    part = plan.cache_spans[0]
    node = part.match_node
    while node.depth > position:
        assert node.parent is not None, "the root ends at zero"
        node = node.parent
    losses = part.losses._replace(state_evicted=part.losses.state_evicted - (position - part.resume))
    deeper = part._replace(
        resume=position,
        resumable=max(position, part.resumable),
        losses=losses,
        resume_node=node,
        resume_state=None,
    )
    return gather(plan.request, plan.prompt, (deeper,), plan.repair)

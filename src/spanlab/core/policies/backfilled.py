"""A tree policy over lower memory tiers for states: an evicted state is loaded back where its KV is still stored.

The tree policy itself is unchanged. States that it stores or evicts are written to the tiers under the digest of their
prefix, so that lookups do not depend on later splits of edges. A request with a pending load holds memory but does not
run.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator

from spanlab.core.eviction.path_names import PathNames
from spanlab.core.policies.over_tiers import OverTiers, PrefillSteps, WaitingRequest
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request
from spanlab.core.reuse import ReusePlan, TreeAllocation, combine_plans
from spanlab.core.store import Store
from spanlab.core.tiers.load import Load, LoadNote
from spanlab.core.tiers.tiers import Tiers
from spanlab.core.tree import Node, State


class BackfilledPolicy(OverTiers[TreePolicy]):
    """Resumes prompts from states of lower tiers that are deeper than those of the tree, within its KV."""

    def __init__(self, tree: TreePolicy, tiers: Tiers, steps: PrefillSteps | None) -> None:
        super().__init__(tree, tiers, steps)
        self._names = PathNames()
        tree.store.tree.watchers.append(self._names)
        tree.store.on_stored, tree.store.before_drop = self._stored, self._leaving
        self._waiting: dict[Load, WaitingRequest] = {}

    @property
    def store(self) -> Store:
        return self._policy.store

    # -- callbacks of the store ---------------------------------------------------------------------------------------

    def _stored(self, state: State) -> None:
        self.tiers.published(self._names.of_state(state))

    def _leaving(self, state: State) -> None:
        self.tiers.evicted(self._names.of_state(state))

    # -- matching -----------------------------------------------------------------------------------------------------

    def match(self, request: Request, now: int, generated: int = 0) -> ReusePlan:
        """Return the reuse of a prompt, with the deepest state of a tier where loading it is faster."""
        plan = self._policy.match(request, now, generated)
        position = self._deepest(plan)
        if position is None:
            return plan
        deeper = _resumed_at(plan, position)
        if self._steps is not None and self._ready_ns(deeper, now, generated) >= self._computed_ns(plan, generated):
            return plan
        return deeper

    def _deepest(self, plan: ReusePlan) -> int | None:
        """Return the position of a tier's deepest state beyond the plan's state, within its KV; None without one."""
        span_plan = plan.cache_spans[0]
        limit = min(span_plan.matched, plan.prompt - (not self.rules.last_token))
        for node, position in _evicted_states(span_plan.match_node, span_plan.resume, limit):
            if self.tiers.holder(self._names.of_position(node, position), len(self.tiers)) is not None:
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
        """Return the nanoseconds to load the state of a plan and compute its prompt, if nothing else ran."""
        keys_by_tier = self.tiers.by_tier([self._key(plan)])
        delays = [
            self.tiers.links[number].delay(self.tiers.bytes_of(number, keys)) for number, keys in keys_by_tier.items()
        ]
        return max(delays) + self._computed_ns(plan, generated)

    # -- loading ------------------------------------------------------------------------------------------------------

    def allocate(self, plan: ReusePlan, now: int, generated: int = 0, drafts: int = 0) -> TreeAllocation | None:
        """Allocate as the tree policy, and load the state at the plan's resume position if the tree has none."""
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
        """Begin to load a state; it is stored again with the tokens of its request, where memory allows."""
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


def _evicted_states(node: Node, above: int, limit: int) -> Iterator[tuple[Node, int]]:
    """Yield positions of a path in (above, limit] whose state was evicted, with their nodes; deepest first."""
    for path_node in node.path():
        if path_node.depth <= above:
            return
        for position in reversed(path_node.lost[: bisect_right(path_node.lost, limit)]):
            if position > above:
                yield path_node, position


def _resumed_at(plan: ReusePlan, position: int) -> ReusePlan:
    """Return the plan with its resume point moved to a position whose state was evicted."""
    span_plan = plan.cache_spans[0]
    node = span_plan.match_node
    while node.depth > position:
        assert node.parent is not None, "the root ends at zero"
        node = node.parent
    losses = span_plan.losses._replace(state_evicted=span_plan.losses.state_evicted - (position - span_plan.resume))
    deeper = span_plan._replace(
        resume=position,
        resumable=max(position, span_plan.resumable),
        losses=losses,
        resume_node=node,
        resume_state=None,
    )
    return combine_plans(plan.request, plan.prompt, (deeper,), plan.repair)

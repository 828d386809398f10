"""One policy: matching, placement and eviction over one store, for the simulator and for the engine.

`plan` looks and changes nothing. What the house calls *commit* is two moments here, because what a step computes can
be stored only after that step: `admit` locks, touches and reserves before it, `store` inserts after it. `release`
undoes what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from spanlab.core.placement import Placer, Visit
from spanlab.core.request import Request
from spanlab.core.reuse import Lease, Losses, ReusePlan
from spanlab.core.roots import Roots
from spanlab.core.store import Store
from spanlab.core.tree import TOKEN_BYTES, Node, PrefixTree, as_bytes


@dataclass(frozen=True, slots=True)
class ReuseRules:
    """The plain facts a policy obeys.

    `keeps`         False keeps nothing: the cold baseline
    `needs_states`  the model has recurrent layers: KV without a state saves nothing
    `grid`          states stand at multiples of it
    `last_token`    False: a fully known prompt still computes one token, for its logits
    `whole_entries` every request stores a whole private entry with all its states, computed here or not
    """

    keeps: bool = True
    needs_states: bool = False
    grid: int = 1
    last_token: bool = False
    whole_entries: bool = False


class Policy:
    """Decides what each prompt reuses and what the store keeps."""

    def __init__(self, rules: ReuseRules, store: Store, roots: Roots, placer: Placer) -> None:
        self.rules, self.content, self.roots, self.placer = rules, store, roots, placer
        self._history = PrefixTree()  # every prompt computed so far: what an infinite cache would hold
        self._refused = PrefixTree()  # prompts that the store could not take
        self._history_roots: dict[tuple[str, int], tuple[Node, Node]] = {}
        page = store.tree.page
        self._unit = max(page, rules.grid) if rules.needs_states else page
        self._working_state = store.state_bytes if rules.needs_states else 0

    # -- looking ------------------------------------------------------------------------------------------------------

    def plan(self, request: Request, now: int) -> ReusePlan:
        """How much of the prompt can be reused at this moment, and where the rest is lost; changes nothing."""
        tokens = as_bytes(request.tokens)
        prompt = len(tokens) // TOKEN_BYTES
        node, matched = self.roots.find(request, tokens)
        seen, refused = self._known(request, tokens)
        seen = max(seen, matched)
        limit = prompt if self.rules.last_token else prompt - 1
        resume_node, resume = self._resume(node, min(matched, limit))
        resumable = resume if matched <= limit else self._resume(node, matched)[1]
        losses = self._losses(prompt, seen, refused, min(seen, limit), matched, resume, node)
        return ReusePlan(request, tokens, prompt, seen, matched, resumable, resume, losses, node, resume_node)

    def _known(self, request: Request, tokens: bytes) -> tuple[int, int]:
        found = self._history_roots.get(self.roots.key(request))
        if found is None:
            return 0, 0
        return self._history.match(found[0], tokens)[1], self._refused.match(found[1], tokens)[1]

    def _resume(self, node: Node, limit: int) -> tuple[Node, int]:
        """The deepest point within `limit` from which computation may restart, and the last whole node before it."""
        step: Node | None = node
        while step is not None and step.parent is not None:
            if step.depth <= limit and (step.state or not self.rules.needs_states):
                break
            step = step.parent
        assert step is not None, "every path ends at a root"
        if self.rules.needs_states:
            return step, step.depth
        page = self.content.tree.page
        return step, limit // page * page

    def _losses(
        self, prompt: int, seen: int, refused: int, usable: int, matched: int, resume: int, node: Node
    ) -> Losses:
        """Walk from the prompt's end to the resume point and name what each stretch was lost to."""
        aligned = usable // self._unit * self._unit
        never_seen, last_token, alignment = prompt - seen, seen - usable, usable - aligned
        if not self.rules.keeps:
            return Losses(never_seen, aligned, 0, 0, 0, alignment, last_token, 0)
        present = min(matched, aligned) // self._unit * self._unit
        locked = max(0, min(refused, aligned) - present)
        tombstone = _deepest_tombstone(node, resume, present) if resume < present else resume
        state_evicted, never_placed = tombstone - resume, present - tombstone
        kv_evicted = aligned - present - locked
        return Losses(never_seen, 0, kv_evicted, state_evicted, never_placed, alignment, last_token, locked)

    # -- admitting ----------------------------------------------------------------------------------------------------

    def admit(self, plan: ReusePlan, now: int) -> Lease | None:
        """Lock what the plan reuses and reserve what it will compute; None, and no change, where that does not fit."""
        content = self.content
        holds_state = self.rules.needs_states and plan.resume > 0
        content.lock(plan.match_node)
        if holds_state:
            content.lock_state(plan.resume_node)
        own = plan.prompt if self.rules.whole_entries else plan.prompt - plan.resume
        kv = own * content.token_bytes
        if not content.reserve(kv, self._working_state):
            if holds_state:
                content.unlock_state(plan.resume_node)
            content.unlock(plan.match_node)
            return None
        content.touch(plan.match_node, now)
        if holds_state:
            content.touch_state(plan.resume_node, now)
        captures = self._captures(plan)
        content.reserve(0, len(captures) * content.state_bytes)
        stored = 0 if self.rules.whole_entries else plan.resume
        state_bytes = self._working_state + len(captures) * content.state_bytes
        return Lease(plan, plan.match_node, plan.resume_node, captures, kv, state_bytes, stored, holds_state)

    def _captures(self, plan: ReusePlan) -> list[int]:
        """Positions whose state this prefill will store: on the grid, computed here, and as many as can be held."""
        if not self.rules.needs_states or not self.rules.keeps:
            return []
        visit = Visit(plan.prompt, plan.matched, plan.seen, plan.resume, plan.request.boundaries)
        least = 0 if self.rules.whole_entries else plan.resume
        floored = {position // self._unit * self._unit for position in self.placer.observe_and_place(visit)}
        captures = sorted(position for position in floored if least < position <= plan.prompt)
        spare = self.content.spare_states(0)
        return captures if len(captures) <= spare else captures[len(captures) - spare :]

    def grow(self, leases: list[Lease], tokens: int) -> bool:
        """Reserve `tokens` more KV tokens for each lease; False, and no change, where they cannot fit."""
        each = tokens * self.content.token_bytes
        if not self.content.reserve(each * len(leases), 0):
            return False
        for lease in leases:
            lease.kv_bytes += each
        return True

    # -- storing ------------------------------------------------------------------------------------------------------

    def store(self, lease: Lease, computed: int, now: int) -> None:
        """Keep what has been computed, up to prompt token `computed`; what was reserved for it changes owner."""
        plan = lease.plan
        complete = computed >= plan.prompt
        if lease.holds_state:
            self.content.unlock_state(plan.resume_node)
            lease.holds_state = False
        page = self.content.tree.page
        stop = min(computed, plan.prompt) // page * page
        if self.rules.keeps and stop > lease.stored and (complete or not self.rules.whole_entries):
            self._insert(lease, stop, now)
        if complete:
            self._remember(plan, now)

    def _insert(self, lease: Lease, stop: int, now: int) -> None:
        content, tokens = self.content, lease.plan.tokens
        if self.rules.whole_entries:  # nothing of the matched entry is needed any more: it may be the one that leaves
            content.unlock(lease.node)
            lease.node = lease.anchor = self.roots.insertion_root(lease.plan)
        if not content.reserve_entry(lease.anchor, tokens, stop):
            self._refuse(lease.plan, now)
            return
        due = [position for position in lease.captures if position <= stop]
        kv, state = (stop - lease.stored) * content.token_bytes, len(due) * content.state_bytes
        content.unreserve(kv, state)
        lease.kv_bytes -= kv
        lease.state_bytes -= state
        node = content.insert(lease.anchor, tokens, stop, due, now)
        content.lock(node)
        content.unlock(lease.node)
        lease.node = lease.anchor = node
        lease.captures = lease.captures[len(due) :]
        lease.captured += len(due)
        lease.stored = stop

    def _remember(self, plan: ReusePlan, now: int) -> None:
        roots = self._history_roots.setdefault(
            self.roots.key(plan.request), (self._history.new_root(), self._refused.new_root())
        )
        self._history.extend(roots[0], plan.tokens, plan.prompt, now)

    def _refuse(self, plan: ReusePlan, now: int) -> None:
        self._remember(plan, now)
        roots = self._history_roots[self.roots.key(plan.request)]
        self._refused.extend(roots[1], plan.tokens, plan.prompt, now)

    def release(self, lease: Lease) -> None:
        """Give up a lease: the request has finished, or has been preempted."""
        if lease.holds_state:
            self.content.unlock_state(lease.plan.resume_node)
        self.content.unlock(lease.node)
        self.content.unreserve(lease.kv_bytes, lease.state_bytes)

    def check(self) -> None:
        """Recount the store from scratch."""
        self.content.check(self.roots.all())


def _deepest_tombstone(node: Node, above: int, within: int) -> int:
    """Depth of the deepest node on the path that lost its state, in (above, within]; `above` where there is none."""
    return next((step.depth for step in node.path() if step.state_lost and above < step.depth <= within), above)

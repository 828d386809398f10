"""One policy: matching, placement and eviction over one store, for the simulator and for the engine.

`plan` looks and changes nothing. What the house calls *commit* is two moments here, because what a step computes can
be stored only after that step: `admit` locks, touches and reserves before it, `store` inserts after it. `release`
undoes what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from spanlab.core.audit import recount
from spanlab.core.placement import Placer, Visit
from spanlab.core.request import Request
from spanlab.core.reuse import Lease, Losses, ReusePlan
from spanlab.core.roots import Roots
from spanlab.core.store import Store
from spanlab.core.tree import TOKEN_BYTES, Node, PrefixTree, State


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
        # three memories of prompts, not of KV: computed (an infinite cache), refused by the store, kept since then
        self._history, self._refused, self._kept_since = PrefixTree(), PrefixTree(), PrefixTree()
        self._memory_roots: dict[tuple[str, int], tuple[Node, Node, Node]] = {}
        page = store.tree.page
        self._unit = max(page, rules.grid) if rules.needs_states else page
        self._working_state = store.state_bytes if rules.needs_states else 0

    # -- looking ------------------------------------------------------------------------------------------------------

    def plan(self, request: Request, now: int) -> ReusePlan:
        """How much of the prompt can be reused at this moment, and where the rest is lost; changes nothing."""
        tokens = request.packed
        prompt = len(tokens) // TOKEN_BYTES
        node, matched = self.roots.find(request, tokens)
        seen, refused = self._known(request, tokens)
        seen = max(seen, matched)
        limit = prompt if self.rules.last_token else prompt - 1
        state, resume = self._resume(node, min(matched, limit))
        resumable = resume if matched <= limit else self._resume(node, matched)[1]
        losses = self._losses(prompt, seen, refused, min(seen, limit), matched, resume, node)
        anchor = node
        while anchor.depth > resume:
            assert anchor.parent is not None, "the root ends at zero"
            anchor = anchor.parent
        return ReusePlan(request, tokens, prompt, seen, matched, resumable, resume, losses, node, anchor, state)

    def _known(self, request: Request, tokens: bytes) -> tuple[int, int]:
        """Longest prefix that was ever computed, and longest that the store refused and has not taken since."""
        roots = self._memory_roots.get(self.roots.key(request))
        if roots is None:
            return 0, 0
        computed = self._history.match(roots[0], tokens)[1]
        if not self._refused.num_tokens:
            return computed, 0
        refused, kept = self._refused.match(roots[1], tokens)[1], self._kept_since.match(roots[2], tokens)[1]
        return computed, refused if refused > kept else 0

    def _resume(self, node: Node, limit: int) -> tuple[State | None, int]:
        """The deepest point within `limit` from which computation may restart, and its state where one is needed."""
        if not self.rules.needs_states:
            page = self.content.tree.page
            return None, limit // page * page
        state = node.deepest_state(limit)
        return state, 0 if state is None else state.position

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
        tombstone = node.deepest_loss(resume, present) if resume < present else resume
        state_evicted, never_placed = tombstone - resume, present - tombstone
        kv_evicted = aligned - present - locked
        return Losses(never_seen, 0, kv_evicted, state_evicted, never_placed, alignment, last_token, locked)

    # -- admitting ----------------------------------------------------------------------------------------------------

    def admit(self, plan: ReusePlan, now: int, generated: int = 0) -> Lease | None:
        """Lock what the plan reuses and reserve what it will compute; None, and no change, where that does not fit.

        `generated` output tokens come back with a request that was preempted; their KV is reserved too.
        """
        content, whole = self.content, self.rules.whole_entries
        state, stored = (None, 0) if whole else (plan.resume_state, plan.resume)
        kv = (plan.prompt - stored + generated) * content.token_bytes
        if not content.fits_beside(plan.match_node, stored, state, kv, self._working_state):
            return None
        # only what is read is locked: an edge that reaches further is cut there, and the rest of it may leave
        node = content.tree.new_root() if whole else content.cut(plan.resume_node, plan.tokens, stored, now)
        content.lock(node)
        if state is not None:
            content.lock_state(state)
        content.touch(plan.match_node, now)  # before room is made: making it may take the unread end of the match
        if plan.resume_state is not None:
            content.touch_state(plan.resume_state, now)
        granted = content.reserve(kv, self._working_state)
        assert granted, "what fits beside a lock fits once it is locked"
        captures = self._captures(plan)
        content.reserve(0, len(captures) * content.state_bytes)
        state_bytes = self._working_state + len(captures) * content.state_bytes
        return Lease(plan, node, captures, kv, state_bytes, stored, state)

    def _captures(self, plan: ReusePlan) -> list[int]:
        """Positions whose state this prefill will store: on the grid, computed here, and as many as can be held."""
        if not self.rules.needs_states or not self.rules.keeps:
            return []
        visit = Visit(plan.prompt, plan.matched, plan.seen, plan.resume, plan.request.boundaries)
        least = 0 if self.rules.whole_entries else plan.resume
        unit = self._unit
        floored = {position // unit * unit for position in self.placer.observe_and_place(visit)}
        captures = sorted([position for position in floored if least < position <= plan.prompt])
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
        if lease.state is not None:
            self.content.unlock_state(lease.state)
            lease.state = None
        page = self.content.tree.page
        stop = min(computed, plan.prompt) // page * page
        if self.rules.keeps and stop > lease.stored and (complete or not self.rules.whole_entries):
            self._insert(lease, stop, now)
        self._remember(self._history, 0, plan, min(computed, plan.prompt), now)
        if complete:
            self._give_back_captures(lease)

    def _insert(self, lease: Lease, stop: int, now: int) -> None:
        content, plan = self.content, lease.plan
        start = self.roots.insertion_root(plan) if self.rules.whole_entries else lease.node
        if not content.reserve_entry(start, plan.tokens, stop):
            self._remember(self._refused, 1, plan, stop, now)
            return
        due = [position for position in lease.captures if position <= stop]
        kv, state = (stop - lease.stored) * content.token_bytes, len(due) * content.state_bytes
        content.unreserve(kv, state)
        lease.kv_bytes -= kv
        lease.state_bytes -= state
        node = content.insert(start, plan.tokens, stop, due, now)
        content.lock(node)
        content.unlock(lease.node)
        lease.node, lease.stored = node, stop
        lease.captures = lease.captures[len(due) :]
        lease.captured += len(due)
        if self._refused.num_tokens:
            self._remember(self._kept_since, 2, plan, stop, now)

    def _give_back_captures(self, lease: Lease) -> None:
        """What was reserved for states that no insertion took."""
        if not lease.captures:
            return
        spare = len(lease.captures) * self.content.state_bytes
        self.content.unreserve(0, spare)
        lease.state_bytes -= spare
        lease.captures = []

    def _remember(self, tree: PrefixTree, which: int, plan: ReusePlan, stop: int, now: int) -> None:
        key = self.roots.key(plan.request)
        if key not in self._memory_roots:
            self._memory_roots[key] = (tree.new_root(), tree.new_root(), tree.new_root())
        tree.extend(self._memory_roots[key][which], plan.tokens, stop, now)

    def release(self, lease: Lease) -> None:
        """Give up a lease: the request has finished, or has been preempted."""
        if lease.state is not None:
            self.content.unlock_state(lease.state)
        self.content.unlock(lease.node)
        self.content.unreserve(lease.kv_bytes, lease.state_bytes)

    def check(self) -> None:
        """Recount the store from scratch."""
        recount(self.content, self.roots.all())

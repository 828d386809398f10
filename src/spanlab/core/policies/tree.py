"""The policy over trees: one tree of prefixes, or one for every parent hash of a span, over one byte-budgeted store.

`match` changes nothing. What a step computes can be stored only after that step: `allocate` locks, touches and
reserves before it, `insert` stores after it, and `free` gives back what is left.
"""

from __future__ import annotations

from spanlab.core.audit import recount
from spanlab.core.ledger import Ledger
from spanlab.core.need import Need
from spanlab.core.placement import Placer, PrefillInfo
from spanlab.core.policies.captures import Captures
from spanlab.core.policies.held_states import HeldStates
from spanlab.core.policies.tree_match import Matcher
from spanlab.core.policies.tree_need import need_of, own_tokens, working_map_bytes
from spanlab.core.prefix_index import PrefixIndex, RootKey
from spanlab.core.request import Request
from spanlab.core.reuse import CacheSpanPlan, ReusePlan, TreeAllocation, prefix_lengths
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.store import Store
from spanlab.core.token_string import TokenString
from spanlab.core.tree import Node, State
from spanlab.core.work import work_of


class TreePolicy:
    """Decides what each prompt reuses and what the store keeps."""

    def __init__(
        self, rules: ReuseRules, store: Store, index: PrefixIndex, placer: Placer, ledger: Ledger | None = None
    ) -> None:
        self.rules, self.store, self.index, self.placer = rules, store, index, placer
        self.ledger = Ledger() if ledger is None else ledger
        self._captures = Captures(rules, store)
        self._matcher = Matcher(rules, store.tree.block_size, index, self._captures, self.ledger)
        self._held = HeldStates(rules, store, self._captures)
        self.layout = self._matcher.layout
        # Recurrent states are there only after the step.
        apart = rules.copies or rules.repair.kind != "none" or rules.needs_states
        self.stores_when_scheduled = rules.cache.share_step and not apart
        self._recovers = rules.replay is not None or rules.backfills  # states within KV that is stored already
        self.retries_each_step = False  # decoding alone frees nothing

    def start_step(self, now: int) -> None:
        """Tell the store the time."""
        self.store.note(now)

    # -- matching -----------------------------------------------------------------------------------------------------

    def match(self, request: Request, now: int, generated: int = 0) -> ReusePlan:
        """How much of the prompt can be reused at this moment, and where the rest is lost; changes nothing."""
        return self._matcher.plan(request)

    # -- allocating ---------------------------------------------------------------------------------------------------

    def allocate(self, plan: ReusePlan, now: int, generated: int = 0, drafts: int = 0) -> TreeAllocation | None:
        """Lock what the plan reuses and reserve what it will compute; None, and no change, where that does not fit.

        `generated` output tokens come back with a request that was preempted; their KV is reserved too, and that of
        `drafts` tokens behind them.
        """
        store, rules = self.store, self.rules
        stored, states = self._reads(plan)
        shared = sum([part.resume for part in plan.cache_spans if part.twin is not None])
        own, reserved_to = own_tokens(plan, rules, store.tree.block_size), plan.prompt + generated + drafts
        kv = (reserved_to - sum(stored) - shared + own) * store.token_bytes
        paths = [(part.match_node, length) for part, length in zip(plan.cache_spans, stored, strict=True)]
        links = {at: part.link for at, part in enumerate(plan.cache_spans) if part.link is not None}
        paths += [(link, link.depth) for link in links.values()]
        working_map = working_map_bytes(plan, rules)
        state_bytes = working_map + (store.state_bytes + rules.state_bytes_saved if rules.needs_states else 0)
        if not store.fits_beside(paths, states, kv, state_bytes):
            return None
        store.note(now, plan.request)
        store.on_admission(plan.request)
        nodes = [self._hold(plan.request, *held) for held in zip(plan.cache_spans, stored, strict=True)]
        for state in states:
            store.lock_state(state)
        for link in links.values():
            store.lock(link)
            store.touch(link, link.depth)
        for part, node in zip(plan.cache_spans, nodes, strict=True):  # before room is made
            store.touch(*((part.match_node, part.matched) if rules.cache.touch == "match" else (node, node.depth)))
            if part.resume_state is not None:
                store.touch_state(part.resume_state)
        granted = store.reserve(kv, state_bytes)
        assert granted, "what fits beside a lock fits once it is locked"
        captures = self._captured(plan, now)
        captured = self._captures.bytes_of(plan, captures)
        store.reserve(0, captured)
        work = work_of(plan, generated, rules.copies, rules.maps is not None)
        return TreeAllocation(
            plan,
            work,
            nodes,
            stored,
            captures,
            kv,
            state_bytes + captured,
            working_map,
            states,
            reserved_to,
            links=links,
        )

    def _reads(self, plan: ReusePlan) -> tuple[list[int], list[State]]:
        """What a request reads where it is stored: tokens by cache span, and states."""
        return [part.stored for part in plan.cache_spans], plan.states

    def _hold(self, request: Request, part: CacheSpanPlan, length: int) -> Node:
        """Lock what is read and nothing more: an edge that reaches further is cut, and the rest of it may leave."""
        store, tokens = self.store, part.cache_span.tokens
        start = part.resume_node
        if start.parent is None:
            start = self.index.insertion_root(request, part.cache_span)
        if self.rules.cache.touch == "resume" and self.rules.needs_states:
            store.cut(start, tokens, self._reach(part))
        node = store.cut(start, tokens, length)
        store.lock(node)
        return node

    def _reach(self, part: CacheSpanPlan) -> int:
        """Matched tokens but the prompt's last one, in whole blocks."""
        block_size, length = self.store.tree.block_size, part.cache_span.stop - part.cache_span.start
        return min(part.matched, length - 1) // block_size * block_size

    def _captured(self, plan: ReusePlan, now: int) -> list[int]:
        """Positions whose state this prefill will store: on the grid, computed here, and as many as can be held."""
        if not self.rules.needs_states or not self.rules.keeps:
            return []
        store, request = self.store, plan.request
        prefill = PrefillInfo(*prefix_lengths(plan), request.boundaries, request, now, store.free_bytes)
        self.placer.observe(prefill)
        placed = self.placer.place(prefill)
        parts = [self._captures.positions(part, placed, self._captures_from(part)) for part in plan.cache_spans]
        found = [position for part in parts for position in part]
        return self._captures.deepest(plan, found, store.spare_state_bytes())

    def _captures_from(self, part: CacheSpanPlan) -> int:
        """The length of a cache span behind which states can be captured: only what is computed passes through them."""
        return part.resume

    def chunk_end(self, plan: ReusePlan, start: int, stop: int, most: int, generated: int) -> int:
        """Chunks end anywhere."""
        return stop

    def append(self, allocation: TreeAllocation, start: int, stop: int, drafts: int = 0) -> bool:
        """Reserve KV of output tokens; that of the prompt, and of output before a preemption, is reserved already."""
        missing = (stop + drafts - allocation.reserved_to) * self.store.token_bytes
        if missing > 0:
            if not self.store.reserve(missing, 0):
                return False
            allocation.kv_bytes += missing
            allocation.reserved_to = stop + drafts
        self._held.follow(allocation, start, stop)
        return True

    def repeat(self, allocations: list[TreeAllocation], starts: list[int], times: int) -> None:
        """Reserve `times` more tokens for each, all at once."""
        token_bytes, total = self.store.token_bytes, 0
        for at, allocation in enumerate(allocations):
            missing = starts[at] + times - allocation.reserved_to
            if missing > 0:
                allocation.kv_bytes += missing * token_bytes
                allocation.reserved_to += missing
                total += missing
        granted = self.store.reserve(total * token_bytes, 0)
        assert granted, "a step was given more tokens than there is memory for"
        if self.rules.progress is not None:
            for at, allocation in enumerate(allocations):
                self._held.follow(allocation, starts[at], starts[at] + times)

    def spare_steps(self, allocations: list[TreeAllocation]) -> int:
        """Tokens that each of `allocations` can certainly take."""
        return self.store.spare_tokens() // len(allocations)

    # -- inserting -----------------------------------------------------------------------------------------------------

    def insert(self, allocation: TreeAllocation, computed: int, now: int, cache_span: int = 0) -> None:
        """Keep what is computed of a cache span, up to prompt token `computed`; its reserved bytes change owner."""
        self.store.note(now, allocation.plan.request)
        part = allocation.plan.cache_spans[cache_span].cache_span
        length = min(computed, part.stop) - part.start
        complete = computed >= allocation.plan.prompt
        if not self.rules.cache.hold_state and (complete or self.rules.maps is None):
            self._held.let_go(allocation)
        if not part.storable or allocation.plan.cache_spans[cache_span].twin is not None:
            return
        block_size = self.store.tree.block_size
        stop = length // block_size * block_size
        if self.rules.cache.store_to == "state":
            stop = max((position for position in allocation.captures if position <= stop), default=0)
        if self.rules.keeps and self._may_store(complete):
            if stop > allocation.stored[cache_span]:
                self._insert(allocation, cache_span, stop, part.tokens)
            elif self._recovers and allocation.captures and allocation.captures[0] <= stop:
                self._insert_states(allocation, cache_span, stop, part.tokens)
        self.ledger.computed(self._key(allocation, cache_span), part.tokens, length)
        if complete:
            self._held.give_back(allocation)

    def _may_store(self, complete: bool) -> bool:
        """Whether a prompt may be stored before all of it is computed."""
        return True

    def _insertion_start(self, allocation: TreeAllocation, cache_span: int) -> Node:
        """The node that a cache span's new tokens are stored below."""
        return allocation.nodes[cache_span]

    def _insert(self, allocation: TreeAllocation, cache_span: int, stop: int, tokens: TokenString) -> None:
        store, start = self.store, self._insertion_start(allocation, cache_span)
        if not store.reserve_entry(start, tokens, stop):
            self.ledger.refused(self._key(allocation, cache_span), tokens, stop)
            return
        part = allocation.plan.cache_spans[cache_span].cache_span
        due, each = self._held.take_due(allocation, part, stop), self._captures.bytes_in(part)
        kv = (stop - allocation.stored[cache_span]) * store.token_bytes
        store.unreserve(kv, 0)
        allocation.kv_bytes -= kv
        node = store.insert(start, tokens, stop, due, each)
        store.lock(node)
        store.unlock(allocation.nodes[cache_span])
        allocation.nodes[cache_span], allocation.stored[cache_span] = node, stop
        self._held.stored(allocation, node)
        self.ledger.kept(self._key(allocation, cache_span), tokens, stop)

    def _insert_states(self, allocation: TreeAllocation, cache_span: int, stop: int, tokens: TokenString) -> None:
        """Keep states up to `stop` on a path whose KV is stored, where a replay has taken them."""
        part, node = allocation.plan.cache_spans[cache_span].cache_span, allocation.nodes[cache_span]
        due = self._held.take_due(allocation, part, stop)
        self.store.insert(node, tokens, node.depth, due, self._captures.bytes_in(part))
        self._held.stored(allocation, node)

    def _key(self, allocation: TreeAllocation, cache_span: int) -> RootKey:
        return self.index.key(allocation.plan.request, allocation.plan.cache_spans[cache_span].cache_span)

    def finish(self, allocation: TreeAllocation, generated: int, now: int) -> None:
        """Keep output tokens behind the prompt, in a hybrid up to the last state: it goes on from no other token."""
        self.store.note(now, allocation.plan.request)
        if self.rules.cache.age_by == "finish":
            self._refresh(allocation)
        if self.rules.needs_states:
            generated = max(0, allocation.captures[-1] - allocation.plan.prompt) if allocation.captures else 0
        if generated and self.rules.keeps:
            self._store_output(allocation, generated)

    def _store_output(self, allocation: TreeAllocation, generated: int) -> None:
        last = len(allocation.plan.cache_spans) - 1
        part = allocation.plan.cache_spans[last].cache_span
        if not part.storable:
            return
        block_size, stop = self.store.tree.block_size, part.stop - part.start + generated
        tokens = part.tokens + allocation.plan.request.output_string(generated)
        if stop // block_size * block_size > allocation.stored[last]:
            self._insert(allocation, last, stop // block_size * block_size, tokens)
        if allocation.plan.request.output is not None:
            self.ledger.computed(self._key(allocation, last), tokens, stop)

    def _refresh(self, allocation: TreeAllocation) -> None:
        """Count what a request used, and the states that it read or stored, as used now."""
        for node, part in zip(allocation.nodes, allocation.plan.cache_spans, strict=True):
            self.store.refresh(node, part.resume)

    def free(self, allocation: TreeAllocation, now: int) -> None:
        """Give up an allocation: the request has finished, or has been preempted."""
        self.store.note(now, allocation.plan.request)
        self._held.let_go(allocation)
        if self.rules.cache.age_by == "release":
            self._refresh(allocation)
        for node in (*allocation.nodes, *allocation.links.values()):
            self.store.unlock(node)
        self.store.unreserve(allocation.kv_bytes, allocation.state_bytes)

    def need(self, request: Request) -> Need:
        """What one request may hold by itself, if all that it may copy is copied; its last token is never computed."""
        cache_spans = self.layout(request)
        return need_of(request, cache_spans, self._matcher.repeats(cache_spans), self.rules, self.store)

    def kept_beside(self, request: Request) -> int:
        """Most tokens that are kept of a prompt beside its cache spans."""
        return 0

    def checkpoints(self, request: Request) -> list[int]:
        """Positions of the states that are stored along a prompt, increasing."""
        found = []
        for cache_span in self.layout(request):
            node, _ = self.index.find(request, cache_span)
            found += [cache_span.start + state.position for step in node.path() for state in step.states]
        return sorted(found)

    def check(self) -> None:
        """Recount the store from scratch."""
        recount(self.store, self.index.all())

"""The policy over trees: one tree of prefixes, or one for every parent hash of a span, over one byte-budgeted store.

`match` changes nothing. What a step computes can be stored only after that step: `allocate` locks, touches and
reserves before it, `insert` stores after it, and `free` gives back what is left.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence

from spanlab.core.audit import recount
from spanlab.core.cache_spans import CacheSpan, repeats, without_tails
from spanlab.core.ledger import Ledger
from spanlab.core.need import Need
from spanlab.core.placement import Placer, PrefillInfo
from spanlab.core.policies.captures import Captures
from spanlab.core.policies.path_cap import surplus
from spanlab.core.prefix_index import PrefixIndex, RootKey
from spanlab.core.recovery import Replay
from spanlab.core.repair import Reused
from spanlab.core.request import Request
from spanlab.core.reuse import CacheSpanPlan, Losses, ReusePlan, TreeAllocation, gather, prefix_lengths
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
        self.layout = rules.layout if rules.repair.by_span else without_tails(rules.layout)
        self._captures = Captures(rules, store)
        self._cut: tuple[Request | None, tuple[CacheSpan, ...]] = (None, ())
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
        cache_spans = self._spans_of(request)
        last = len(cache_spans) - 1
        twins = self._repeats(cache_spans) if last else {}
        plans: list[CacheSpanPlan] = []
        for at, cache_span in enumerate(cache_spans):
            twin = twins.get(at)
            looked = (
                self._look(request, cache_span, at == last) if twin is None else plans[twin].repeated(cache_span, twin)
            )
            plans.append(looked)
        return gather(request, cache_spans[-1].stop, tuple(plans), self.rules.repair)

    def _spans_of(self, request: Request) -> tuple[CacheSpan, ...]:
        """A request's cache spans; the head of the queue, which is matched again and again, is cut once."""
        if request is not self._cut[0]:
            self._cut = request, self.layout(request)
        return self._cut[1]

    def _repeats(self, cache_spans: tuple[CacheSpan, ...]) -> dict[int, int]:
        """Spans that read what an earlier one computes; the state runs through each of them where there is one."""
        return repeats(cache_spans) if self.rules.keeps and not self.rules.needs_states else {}

    def _look(self, request: Request, cache_span: CacheSpan, last: bool) -> CacheSpanPlan:
        length = cache_span.stop - cache_span.start
        node, matched = self.index.find(request, cache_span)
        seen, refused = self.ledger.known(self.index.key(request, cache_span), cache_span.tokens)
        seen = max(seen, matched)
        limit = length - 1 if last and not self.rules.last_token else length
        state, resume = self._resume(node, min(matched, limit))
        resumable = resume if matched <= limit else self._resume(node, matched)[1]
        unit = self._captures.unit(cache_span)
        losses = self._losses(unit, length, seen, refused, min(seen, limit), matched, resume, node)
        anchor = node
        while anchor.depth > resume:
            assert anchor.parent is not None, "the root ends at zero"
            anchor = anchor.parent
        looked = CacheSpanPlan(cache_span, seen, matched, resumable, resume, losses, node, anchor, state)
        return looked if self.rules.replay is None else self._replayed(looked, self.rules.replay, min(matched, limit))

    def _replayed(self, looked: CacheSpanPlan, replay: Replay, limit: int) -> CacheSpanPlan:
        """The same plan with the KV up to `limit`, whole blocks, that a replay reads."""
        block_size = self.store.tree.block_size
        return looked._replace(replayed=replay.tokens(limit // block_size * block_size - looked.resume))

    def _resume(self, node: Node, limit: int) -> tuple[State | None, int]:
        """The deepest point within `limit` from which computation may restart, and its state where one is needed."""
        if not self.rules.needs_states:
            block_size = self.store.tree.block_size
            return None, limit // block_size * block_size
        state = node.deepest_state(limit)
        return state, 0 if state is None else state.position

    def _losses(
        self, unit: int, length: int, seen: int, refused: int, usable: int, matched: int, resume: int, node: Node
    ) -> Losses:
        """Walk from the cache span's end to the resume point and name what each stretch was lost to."""
        aligned = usable // unit * unit
        never_seen, last_token, alignment = length - seen, seen - usable, usable - aligned
        if not self.rules.keeps:
            return Losses(never_seen, aligned, 0, 0, 0, alignment, last_token, 0)
        present = min(matched, aligned) // unit * unit
        locked = max(0, min(refused, aligned) - present)
        tombstone = node.deepest_loss(resume, present) if resume < present else resume
        state_evicted, never_placed = tombstone - resume, present - tombstone
        kv_evicted = aligned - present - locked
        return Losses(never_seen, 0, kv_evicted, state_evicted, never_placed, alignment, last_token, locked)

    # -- allocating ---------------------------------------------------------------------------------------------------

    def allocate(self, plan: ReusePlan, now: int, generated: int = 0) -> TreeAllocation | None:
        """Lock what the plan reuses and reserve what it will compute; None, and no change, where that does not fit.

        `generated` output tokens come back with a request that was preempted; their KV is reserved too.
        """
        store, rules = self.store, self.rules
        stored, states = self._reads(plan)
        shared = sum([part.resume for part in plan.cache_spans if part.twin is not None])
        kv = (plan.prompt - sum(stored) - shared + self._own_tokens(plan) + generated) * store.token_bytes
        paths = [(part.match_node, length) for part, length in zip(plan.cache_spans, stored, strict=True)]
        links = {at: part.link for at, part in enumerate(plan.cache_spans) if part.link is not None}
        paths += [(link, link.depth) for link in links.values()]
        working_map = self._working_map(plan)
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
        reserved_to = plan.prompt + generated
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

    def _working_map(self, plan: ReusePlan) -> int:
        """Bytes of the map that grows while a span is computed."""
        computes = any(part.cache_span.independent and not part.whole for part in plan.cache_spans)
        return self.rules.working_map_bytes if computes else 0

    def _own_tokens(self, plan: ReusePlan) -> int:
        """KV tokens needed for what may not be written in place."""
        rules = self.rules
        if rules.copies:
            return sum(part.to_copy for part in plan.cache_spans)
        return 0 if rules.repair.kind == "none" else rules.repair.private(plan.spans, self.store.tree.block_size)

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
        if self.rules.progress is not None:
            self._follow(allocation, start, stop)
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
                self._follow(allocation, starts[at], starts[at] + times)

    def _follow(self, allocation: TreeAllocation, start: int, stop: int) -> None:
        """Note the states that computing tokens `[start, stop)` takes, as far as there is room for them."""
        progress, captures, store = self.rules.progress, allocation.captures, self.store
        assert progress is not None and self.rules.keeps, "somebody follows what is kept"
        for position in progress.positions(allocation.plan.prompt, start, stop):
            replaced = captures[-1] if captures and captures[-1] > allocation.plan.prompt else None
            if position in captures:
                continue
            if replaced is not None and not progress.stays(replaced):
                captures[-1] = position
            elif store.spare_state_bytes() >= store.state_bytes and store.reserve(0, store.state_bytes):
                insort(captures, position)
                allocation.state_bytes += store.state_bytes

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
            self._let_go(allocation)
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
            self._give_back_working(allocation)

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
        due, each = self._due(allocation, part, stop), self._captures.bytes_in(part)
        kv = (stop - allocation.stored[cache_span]) * store.token_bytes
        store.unreserve(kv, 0)
        allocation.kv_bytes -= kv
        node = store.insert(start, tokens, stop, due, each)
        store.lock(node)
        store.unlock(allocation.nodes[cache_span])
        allocation.nodes[cache_span], allocation.stored[cache_span] = node, stop
        self._stored_states(allocation, node)
        self.ledger.kept(self._key(allocation, cache_span), tokens, stop)

    def _insert_states(self, allocation: TreeAllocation, cache_span: int, stop: int, tokens: TokenString) -> None:
        """Keep states up to `stop` on a path whose KV is stored, where a replay has taken them."""
        part, node = allocation.plan.cache_spans[cache_span].cache_span, allocation.nodes[cache_span]
        due = self._due(allocation, part, stop)
        self.store.insert(node, tokens, node.depth, due, self._captures.bytes_in(part))
        self._stored_states(allocation, node)

    def _due(self, allocation: TreeAllocation, part: CacheSpan, stop: int) -> list[int]:
        """Take the captures of a cache span up to `stop`, in its own tokens, out of an allocation with their bytes."""
        first, last = (bisect_right(allocation.captures, part.start + length) for length in (0, stop))
        due = [position - part.start for position in allocation.captures[first:last]]
        state = len(due) * self._captures.bytes_in(part)
        self.store.unreserve(0, state)
        allocation.state_bytes -= state
        del allocation.captures[first:last]
        allocation.captured += len(due)
        allocation.captured_maps += len(due) * part.independent
        return due

    def _stored_states(self, allocation: TreeAllocation, node: Node) -> None:
        """Hold the newest of the states that have been stored, and keep to the cap of their path."""
        if self.rules.cache.hold_state:
            self._hold_state(allocation, node)
        if self.rules.cache.states_per_path is not None:
            self.store.drop_states(surplus(node, self.rules.cache.states_per_path))

    def _key(self, allocation: TreeAllocation, cache_span: int) -> RootKey:
        return self.index.key(allocation.plan.request, allocation.plan.cache_spans[cache_span].cache_span)

    def _give_back_working(self, allocation: TreeAllocation) -> None:
        """What was reserved for states that no insertion took, and for the map of a span that is computed."""
        spare = allocation.working_map + self._captures.bytes_of(allocation.plan, allocation.captures)
        self.store.unreserve(0, spare)
        allocation.state_bytes -= spare
        allocation.working_map, allocation.captures = 0, []

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

    def _let_go(self, allocation: TreeAllocation) -> None:
        """Unlock the states that have been read."""
        for state in allocation.states:
            self.store.unlock_state(state)
        allocation.states = []

    def _hold_state(self, allocation: TreeAllocation, node: Node) -> None:
        """Lock the newest state of a request's path, if its node has one at its end."""
        self._let_go(allocation)
        state = node.deepest_state(node.depth)
        if state is not None and state.position == node.depth:
            self.store.lock_state(state)
            allocation.states = [state]

    def free(self, allocation: TreeAllocation, now: int) -> None:
        """Give up an allocation: the request has finished, or has been preempted."""
        self.store.note(now, allocation.plan.request)
        self._let_go(allocation)
        if self.rules.cache.age_by == "release":
            self._refresh(allocation)
        for node in (*allocation.nodes, *allocation.links.values()):
            self.store.unlock(node)
        self.store.unreserve(allocation.kv_bytes, allocation.state_bytes)

    def need(self, request: Request) -> Need:
        """What one request may hold by itself, if all that it may copy is copied; its last token is never computed."""
        rules, cache_spans, store = self.rules, self.layout(request), self.store
        spans = [cache_span for cache_span in cache_spans if cache_span.independent]
        copies = self._copies(spans)
        twins = self._repeats(cache_spans)
        shared = sum(cache_spans[at].stop - cache_spans[at].start for at in twins)
        tokens = request.num_tokens - shared + request.output_len - 1 + copies
        states = 1 + rules.cache.hold_state  # the running one, and the newest one that is stored
        states += 0 if rules.progress is None else rules.progress.most_held(request.output_len)
        running = rules.state_bytes_saved + rules.working_map_bytes * bool(spans)
        state = (states * store.state_bytes + running) * rules.needs_states
        sequences = len(cache_spans) - len(twins) + len(spans) * (copies > 0)
        return Need(tokens, copies, sequences, tokens * store.token_bytes, state)

    def kept_beside(self, request: Request) -> int:
        """Most tokens that are kept of a prompt beside its cache spans."""
        return 0

    def _copies(self, spans: Sequence[CacheSpan]) -> int:
        """Tokens of spans that a request may copy."""
        rules = self.rules
        if rules.copies:
            return sum(cache_span.stop - cache_span.start for cache_span in spans)
        reused = [Reused(cache_span.start, cache_span.stop, 0) for cache_span in spans if not cache_span.exact]
        return 0 if rules.repair.kind == "none" else rules.repair.private(reused, self.store.tree.block_size)

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

"""The policy over trees: one tree of prefixes, or one for every parent hash of a span, over one byte-budgeted store.

`match` is read-only. The tokens that a step computes can be stored only after that step: `allocate` locks, touches and
reserves before it, `insert` stores after it, and `free` releases the remaining locks and bytes.
"""

from __future__ import annotations

from bisect import bisect_right

from spanlab.core.audit import recount
from spanlab.core.ledger import Ledger
from spanlab.core.need import Need
from spanlab.core.placement import Placer, PrefillInfo
from spanlab.core.policies.captures import Captures
from spanlab.core.policies.request_states import RequestStates
from spanlab.core.policies.tree_match import Matcher
from spanlab.core.policies.tree_need import need_of, private_tokens, working_map_bytes
from spanlab.core.prefix_index import PrefixIndex, RootKey
from spanlab.core.protocol import BeforeChange, unnoticed
from spanlab.core.request import Request
from spanlab.core.reuse import CacheSpanPlan, ReusePlan, TreeAllocation, prefix_lengths
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.store import Store
from spanlab.core.token_string import TokenString
from spanlab.core.tree import Node, State
from spanlab.core.work import work_of


class TreePolicy:
    """Matches each prompt with the trees, and stores what is computed of it."""

    def __init__(
        self, rules: ReuseRules, store: Store, index: PrefixIndex, placer: Placer, ledger: Ledger | None = None
    ) -> None:
        self.rules, self.store, self.index, self.placer = rules, store, index, placer
        self.ledger = Ledger() if ledger is None else ledger
        self._captures = Captures(rules, store)
        self._matcher = Matcher(rules, store.tree.block_size, index, self._captures, self.ledger)
        self._states = RequestStates(rules, store, self._captures)
        self.layout = self._matcher.layout
        # Recurrent states exist only after the step.
        after_step = rules.copies or rules.repair.kind != "none" or rules.needs_states
        self.stores_when_scheduled = rules.cache.share_step and not after_step
        # A replay or a load leaves states within KV that is stored already.
        self._inserts_states_alone = rules.replay is not None or rules.backfills
        self.retries_each_step = False  # decoding alone frees nothing

    def start_step(self, now: int) -> None:
        """Set the time of the store."""
        self.store.note(now)

    # -- matching -----------------------------------------------------------------------------------------------------

    def match(self, request: Request, now: int, generated: int = 0) -> ReusePlan:
        """Return the reuse of the prompt and the causes of lost tokens; read-only."""
        return self._matcher.plan(request)

    # -- allocating ---------------------------------------------------------------------------------------------------

    def allocate(self, plan: ReusePlan, now: int, generated: int = 0, drafts: int = 0) -> TreeAllocation | None:
        """Lock the reused entries and reserve memory for computed ones; None, and no change, where that does not fit.

        A preempted request resumes with `generated` output tokens; their KV is reserved too, and that of `drafts`
        tokens after them.
        """
        store, rules = self.store, self.rules
        stored, states = self._stored_reads(plan)
        shared = sum([span_plan.resume for span_plan in plan.cache_spans if span_plan.twin is not None])
        private, reserved_to = private_tokens(plan, rules, store.tree.block_size), plan.prompt + generated + drafts
        kv = (reserved_to - sum(stored) - shared + private) * store.token_bytes
        paths = [(span_plan.match_node, length) for span_plan, length in zip(plan.cache_spans, stored, strict=True)]
        links = {
            index: span_plan.link for index, span_plan in enumerate(plan.cache_spans) if span_plan.link is not None
        }
        paths += [(link, link.depth) for link in links.values()]
        working_map = working_map_bytes(plan, rules)
        state_bytes = working_map + (store.state_bytes + rules.state_bytes_saved if rules.needs_states else 0)
        if not store.fits_with_locks(paths, states, kv, state_bytes):
            return None
        store.note(now, plan.request)
        store.on_admission(plan.request)
        nodes = [self._lock_path(plan.request, *path) for path in zip(plan.cache_spans, stored, strict=True)]
        for state in states:
            store.lock_state(state)
        for link in links.values():
            store.lock(link)
            store.touch(link, link.depth)
        for span_plan, node in zip(plan.cache_spans, nodes, strict=True):  # before `reserve` evicts
            on_match = rules.cache.touch == "match"
            store.touch(*((span_plan.match_node, span_plan.matched) if on_match else (node, node.depth)))
            if span_plan.resume_state is not None:
                store.touch_state(span_plan.resume_state)
        granted = store.reserve(kv, state_bytes)
        assert granted, "`fits_beside` has counted these bytes"
        if not generated:
            self._record_misses(plan)
        captures = self._plan_captures(plan, now)
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

    def _record_misses(self, plan: ReusePlan) -> None:
        for span_plan in plan.cache_spans:
            if span_plan.losses.kv_evicted:
                span, matched = span_plan.cache_span, span_plan.matched
                self.ledger.missed(self.index.key(plan.request, span), span.tokens, matched, span.stop - span.start)

    def _stored_reads(self, plan: ReusePlan) -> tuple[list[int], list[State]]:
        """Return what a request reads from the store: tokens by cache span, and states."""
        return [span_plan.stored for span_plan in plan.cache_spans], plan.states

    def _lock_path(self, request: Request, span_plan: CacheSpanPlan, length: int) -> Node:
        """Lock exactly the tokens that are read: split a longer edge, so that its suffix can be evicted."""
        store, tokens = self.store, span_plan.cache_span.tokens
        start = span_plan.resume_node
        if start.parent is None:
            start = self.index.insertion_root(request, span_plan.cache_span)
        if self.rules.cache.touch == "resume" and self.rules.needs_states:
            store.cut(start, tokens, self._matched_blocks(span_plan))
        node = store.cut(start, tokens, length)
        store.lock(node)
        return node

    def _matched_blocks(self, span_plan: CacheSpanPlan) -> int:
        """Return the matched tokens in whole blocks, without the last token of the cache span."""
        block_size, length = self.store.tree.block_size, span_plan.cache_span.stop - span_plan.cache_span.start
        return min(span_plan.matched, length - 1) // block_size * block_size

    def _plan_captures(self, plan: ReusePlan, now: int) -> list[int]:
        """Return the positions of states that this prefill stores: on the grid, computed here, as many as fit."""
        if not self.rules.needs_states or not self.rules.keeps:
            return []
        store, request = self.store, plan.request
        prefill = PrefillInfo(*prefix_lengths(plan), request.boundaries, request, now, store.free_bytes)
        self.placer.observe(prefill)
        placed = self.placer.place(prefill)
        captures: list[int] = []
        for span_plan in plan.cache_spans:
            captures += self._captures.positions(span_plan, placed, self._computed_from(span_plan))
        return self._captures.deepest(plan, captures, store.spare_state_bytes())

    def _computed_from(self, span_plan: CacheSpanPlan) -> int:
        """Return the tokens of a cache span that are not computed; states can be captured only after them."""
        return span_plan.resume

    def chunk_end(self, plan: ReusePlan, start: int, stop: int, most: int, generated: int) -> int:
        """Return `stop`: a chunk may end anywhere."""
        return stop

    def append(self, allocation: TreeAllocation, start: int, stop: int, drafts: int = 0) -> bool:
        """Reserve KV of output tokens; KV of the prompt, and of output before a preemption, is reserved already."""
        missing = (stop + drafts - allocation.reserved_to) * self.store.token_bytes
        if missing > 0:
            if not self.store.reserve(missing, 0):
                return False
            allocation.kv_bytes += missing
            allocation.reserved_to = stop + drafts
        self._states.follow(allocation, start, stop)
        return True

    def repeat(
        self, allocations: list[TreeAllocation], starts: list[int], times: int, before: BeforeChange = unnoticed
    ) -> None:
        """Reserve `times` more tokens for each allocation, at once where nothing is evicted for them."""
        token_bytes, slack = self.store.token_bytes, []  # tokens of each allocation that are reserved already
        for index, allocation in enumerate(allocations):
            slack.append(allocation.reserved_to - starts[index])
            missing = starts[index] + times - allocation.reserved_to
            if missing > 0:
                allocation.kv_bytes += missing * token_bytes
                allocation.reserved_to += missing
        done, reserved = 0, 0
        while done < times:
            fitting = self._steps_without_eviction(slack, reserved, times)
            if fitting <= done:  # the next step evicts
                before(done)
                fitting = done + 1
            done, total = fitting, _tokens_after(slack, fitting)
            granted = self.store.reserve((total - reserved) * token_bytes, 0)
            assert granted, "more steps were scheduled than memory allows"
            reserved = total
        if self.rules.progress is not None:
            for index, allocation in enumerate(allocations):
                self._states.follow(allocation, starts[index], starts[index] + times)

    def _steps_without_eviction(self, slack: list[int], reserved: int, times: int) -> int:
        """Return the most steps, up to `times`, whose tokens beside `reserved` ones fit into free memory."""
        free, token_bytes = self.store.free_bytes(), self.store.token_bytes
        if (_tokens_after(slack, times) - reserved) * token_bytes <= free:
            return times
        return (
            bisect_right(range(times), free, key=lambda steps: (_tokens_after(slack, steps) - reserved) * token_bytes)
            - 1
        )

    def spare_steps(self, allocations: list[TreeAllocation]) -> int:
        """Return the number of tokens that certainly fit for each of `allocations`."""
        return self.store.spare_tokens() // len(allocations)

    # -- inserting -----------------------------------------------------------------------------------------------------

    def insert(self, allocation: TreeAllocation, computed: int, now: int, cache_span: int = 0) -> None:
        """Store a cache span up to prompt token `computed`, in the bytes that the request has reserved."""
        self.store.note(now, allocation.plan.request)
        span = allocation.plan.cache_spans[cache_span].cache_span
        length = min(computed, span.stop) - span.start
        complete = computed >= allocation.plan.prompt
        if not self.rules.cache.hold_state and (complete or self.rules.maps is None):
            self._states.unlock(allocation)
        if not span.storable or allocation.plan.cache_spans[cache_span].twin is not None:
            return
        block_size = self.store.tree.block_size
        stop = length // block_size * block_size
        if self.rules.cache.store_to == "state":
            stop = max((position for position in allocation.captures if position <= stop), default=0)
        if self.rules.keeps and self._may_store(complete):
            if stop > allocation.stored[cache_span]:
                self._insert(allocation, cache_span, stop, span.tokens)
            elif self._inserts_states_alone and allocation.captures and allocation.captures[0] <= stop:
                self._insert_states(allocation, cache_span, stop, span.tokens)
        self.ledger.computed(self._key(allocation, cache_span), span.tokens, length)
        if complete:
            self._states.release_reserved(allocation)

    def _may_store(self, complete: bool) -> bool:
        """Whether a prompt may be stored now; `complete`: all of it is computed."""
        return True

    def _insertion_start(self, allocation: TreeAllocation, cache_span: int) -> Node:
        """Return the node below which new tokens of a cache span are stored."""
        return allocation.nodes[cache_span]

    def _insert(self, allocation: TreeAllocation, cache_span: int, stop: int, tokens: TokenString) -> None:
        store, start = self.store, self._insertion_start(allocation, cache_span)
        if not store.reserve_entry(start, tokens, stop):
            self.ledger.refused(self._key(allocation, cache_span), tokens, stop)
            return
        span = allocation.plan.cache_spans[cache_span].cache_span
        positions = self._states.take_captures(allocation, span, stop)
        kv = (stop - allocation.stored[cache_span]) * store.token_bytes
        store.unreserve(kv, 0)
        allocation.kv_bytes -= kv
        node = store.insert(start, tokens, stop, positions, self._captures.bytes_in(span))
        store.lock(node)
        store.unlock(allocation.nodes[cache_span])
        allocation.nodes[cache_span], allocation.stored[cache_span] = node, stop
        self._states.after_insert(allocation, node)
        self.ledger.stored(self._key(allocation, cache_span), tokens, stop)

    def _insert_states(self, allocation: TreeAllocation, cache_span: int, stop: int, tokens: TokenString) -> None:
        """Store states up to `stop` that a replay has captured on a path whose KV is stored already."""
        span, node = allocation.plan.cache_spans[cache_span].cache_span, allocation.nodes[cache_span]
        positions = self._states.take_captures(allocation, span, stop)
        self.store.insert(node, tokens, node.depth, positions, self._captures.bytes_in(span))
        self._states.after_insert(allocation, node)

    def _key(self, allocation: TreeAllocation, cache_span: int) -> RootKey:
        return self.index.key(allocation.plan.request, allocation.plan.cache_spans[cache_span].cache_span)

    def finish(self, allocation: TreeAllocation, generated: int, now: int) -> None:
        """Store output tokens after the prompt, in a hybrid up to the last state, where alone it can resume."""
        self.store.note(now, allocation.plan.request)
        if self.rules.cache.age_by == "finish":
            self._refresh(allocation)
        if self.rules.needs_states:
            generated = max(0, allocation.captures[-1] - allocation.plan.prompt) if allocation.captures else 0
        if generated and self.rules.keeps:
            self._store_output(allocation, generated)

    def _store_output(self, allocation: TreeAllocation, generated: int) -> None:
        last = len(allocation.plan.cache_spans) - 1
        span = allocation.plan.cache_spans[last].cache_span
        if not span.storable:
            return
        block_size, stop = self.store.tree.block_size, span.stop - span.start + generated
        tokens = span.tokens + allocation.plan.request.output_string(generated)
        if stop // block_size * block_size > allocation.stored[last]:
            self._insert(allocation, last, stop // block_size * block_size, tokens)
        if allocation.plan.request.output is not None:
            self.ledger.computed(self._key(allocation, last), tokens, stop)

    def _refresh(self, allocation: TreeAllocation) -> None:
        """Set the age of the KV that a request used, and of the states that it read or stored, to now."""
        for node, span_plan in zip(allocation.nodes, allocation.plan.cache_spans, strict=True):
            self.store.refresh(node, span_plan.resume)

    def free(self, allocation: TreeAllocation, now: int) -> None:
        """Release the locks and bytes of a finished or preempted request."""
        self.store.note(now, allocation.plan.request)
        self._states.unlock(allocation)
        if self.rules.cache.age_by == "release":
            self._refresh(allocation)
        for node in (*allocation.nodes, *allocation.links.values()):
            self.store.unlock(node)
        self.store.unreserve(allocation.kv_bytes, allocation.state_bytes)

    def need(self, request: Request) -> Need:
        """Return the largest memory of one request, with all possible copies; its last token is never computed."""
        cache_spans = self.layout(request)
        return need_of(request, cache_spans, self._matcher.repeats(cache_spans), self.rules, self.store)

    def extra_stored_tokens(self, request: Request) -> int:
        """Return the maximum number of tokens that are stored beside the cache spans of a prompt."""
        return 0

    def checkpoints(self, request: Request) -> list[int]:
        """Return the positions of the stored states along a prompt, increasing."""
        positions = []
        for cache_span in self.layout(request):
            node, _ = self.index.find(request, cache_span)
            positions += [cache_span.start + state.position for step in node.path() for state in step.states]
        return sorted(positions)

    def check(self) -> None:
        """Verify the store by recounting."""
        recount(self.store, self.index.all())


def _tokens_after(slack: list[int], steps: int) -> int:
    """Return the tokens that allocations need after some steps, beside those that they have reserved already."""
    return sum([steps - spare for spare in slack if steps > spare])

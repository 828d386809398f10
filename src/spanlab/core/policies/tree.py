"""The policy over trees: one tree of prefixes, or one for every parent hash of a span, over one
byte-budgeted store.

`match` is read-only. The tokens that a step computes can be stored only after that step: `allocate`
locks, touches and reserves before it, `insert` stores after it, and `free` releases the remaining
locks and bytes.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Sequence

from spanlab.core.ledger import Ledger
from spanlab.core.placement.rules import Placer, PrefillInfo
from spanlab.core.plan import (
    CacheSpanPlan,
    DecodeBatch,
    Losses,
    Match,
    Need,
    ReusePlan,
    TreeAllocation,
    combine_plans,
    losses_of,
    prefix_lengths,
    work_of,
)
from spanlab.core.protocol import BeforeChange, unnoticed
from spanlab.core.repair import ReusedSpan
from spanlab.core.request import UNLIMITED, Request
from spanlab.core.rules import ReuseRules
from spanlab.core.store import Store, recount
from spanlab.core.token_string import TokenString
from spanlab.core.tree import CacheSpan, Node, PrefixIndex, RootKey, State, repeats, without_tails

# ------------------------------------------------------------------------------
# Captures of a prefill and their bytes: checkpoints in ordered text, and maps of spans.
# ------------------------------------------------------------------------------


class Captures:
    """Positions of captures in the prompt: checkpoints on the grid of their cache span, maps at
    block ends."""

    def __init__(self, rules: ReuseRules, store: Store) -> None:
        self._maps = rules.maps
        self._map_bytes = rules.map_bytes
        self._state_bytes = store.state_bytes
        self._block_size = store.tree.block_size
        self._unit = max(self._block_size, rules.grid) if rules.needs_states else self._block_size

    def unit(self, cache_span: CacheSpan) -> int:
        """Return the unit to which resume positions in a cache span are rounded down."""
        return self._block_size if cache_span.independent else self._unit

    def bytes_in(self, cache_span: CacheSpan) -> int:
        """Return the bytes of one capture in a cache span."""
        return self._map_bytes if cache_span.independent else self._state_bytes

    def bytes_of(self, plan: ReusePlan, positions: Sequence[int]) -> int:
        """Return the bytes of captures at positions of a prompt."""
        if self._maps is None:
            return len(positions) * self._state_bytes
        return sum([self.bytes_in(plan.cache_span_at(position)) for position in positions])

    def positions(
        self, span_plan: CacheSpanPlan, placed: Sequence[int], computed_from: int
    ) -> list[int]:
        """Return the captures in a cache span, increasing: `placed` positions in ordered text, or
        maps of a span.

        `computed_from`  tokens of the cache span that the prefill does not compute
        """
        cache_span = span_plan.cache_span
        start, stop, unit = cache_span.start, cache_span.stop, self.unit(cache_span)
        if cache_span.independent:
            assert self._maps is not None, "spans of a model with recurrent layers are maps"
            placed = [start + length for length in self._maps.positions(stop - start)]
        inside = [position for position in placed if start < position <= stop]
        floored = {start + (position - start) // unit * unit for position in inside}
        return sorted([position for position in floored if position > start + computed_from])

    def deepest(self, plan: ReusePlan, positions: list[int], spare: int) -> list[int]:
        """Return the last of these positions, as many as fit in `spare` bytes."""
        first, needed = 0, self.bytes_of(plan, positions)
        while needed > spare:
            needed -= self.bytes_of(plan, positions[first : first + 1])
            first += 1
        return positions[first:]


# ------------------------------------------------------------------------------
# Match of a prompt with the trees: reusable tokens, and the causes of tokens that are not
# reused.
# ------------------------------------------------------------------------------


class Matcher:
    """Matches prompts with the trees; read-only."""

    def __init__(
        self,
        rules: ReuseRules,
        block_size: int,
        index: PrefixIndex,
        captures: Captures,
        ledger: Ledger,
    ) -> None:
        self._rules = rules
        self._block_size = block_size
        self._index = index
        self._captures = captures
        self._ledger = ledger
        self.layout = rules.layout if rules.repair.by_span else without_tails(rules.layout)
        self._last_layout: tuple[Request | None, tuple[CacheSpan, ...]] = (None, ())

    def plan(self, request: Request) -> ReusePlan:
        """Return the reuse of a prompt and the causes of lost tokens."""
        cache_spans = self.cache_spans(request)
        last = len(cache_spans) - 1
        twins = self.repeats(cache_spans) if last else {}
        plans: list[CacheSpanPlan] = []
        for index, cache_span in enumerate(cache_spans):
            twin = twins.get(index)
            if twin is None:
                plans.append(self._match_span(request, cache_span, index == last))
            else:
                plans.append(plans[twin].repeated(cache_span, twin))
        return combine_plans(request, cache_spans[-1].stop, tuple(plans), self._rules.repair)

    def cache_spans(self, request: Request) -> tuple[CacheSpan, ...]:
        """Return the cache spans of a request; cached for the head of the queue, which is matched
        repeatedly."""
        if request is not self._last_layout[0]:
            self._last_layout = request, self.layout(request)
        return self._last_layout[1]

    def repeats(self, cache_spans: tuple[CacheSpan, ...]) -> dict[int, int]:
        """Return the spans that read the KV of an equal earlier span, as in `cache_spans.repeats`;
        none in a hybrid."""
        return repeats(cache_spans) if self._rules.keeps and not self._rules.needs_states else {}

    def _match_span(self, request: Request, cache_span: CacheSpan, last: bool) -> CacheSpanPlan:
        length = cache_span.stop - cache_span.start
        node, matched = self._index.find(request, cache_span)
        seen, refused = self._ledger.lookup(self._index.key(request, cache_span), cache_span.tokens)
        seen = max(seen, matched)
        # The last token of a prompt is computed for its logits, even where its KV is present.
        limit = length - 1 if last and not self._rules.last_token else length
        state, resume = self._resume(node, min(matched, limit))
        resumable = resume if matched <= limit else self._resume(node, matched)[1]
        usable = min(seen, limit)
        losses = Losses(length - seen, 0, 0, 0, 0, 0, seen - usable, 0)
        if usable > resume:
            unit, present_tokens, evicted = self._captures.unit(cache_span), min(matched, usable), 0
            if self._rules.keeps:
                key = self._index.key(request, cache_span)
                evicted = self._ledger.evicted(key, cache_span.tokens, matched, usable)
            else:  # nothing is stored, so that nothing was evicted or refused
                present_tokens = refused = 0
            aligned, present = self._usable(usable, unit), self._usable(present_tokens, unit)
            # Up to the deepest state that was stored once, an eviction is to blame; behind it, the
            # placement.
            tombstone = node.deepest_loss(resume, present) if resume < present else resume
            match = Match(
                length, seen, usable, aligned, present_tokens, present, resume, tombstone, unit
            )
            losses = losses_of(match, evicted, refused)
        anchor = node
        while anchor.depth > resume:
            assert anchor.parent is not None, "the root ends at zero"
            anchor = anchor.parent
        plan = CacheSpanPlan(
            cache_span, seen, matched, resumable, resume, losses, node, anchor, state
        )
        if self._rules.replay is None:
            return plan
        stop = min(matched, limit) // self._block_size * self._block_size
        return plan._replace(replayed=self._rules.replay.tokens(stop - plan.resume))

    def _resume(self, node: Node, limit: int) -> tuple[State | None, int]:
        """Return the state to resume from, None for attention alone, and the deepest resume
        position within `limit`."""
        if not self._rules.needs_states:
            return None, self._usable(limit, self._block_size)
        state = node.deepest_state(limit)
        return state, 0 if state is None else state.position

    def _usable(self, tokens: int, unit: int) -> int:
        """Return how many of the matched tokens are reused: whole units, without the last one with
        `drops_last`."""
        return max(0, tokens // unit - self._rules.drops_last) * unit


# ------------------------------------------------------------------------------
# Memory that one request needs in a store of trees: the maximum, and that of one plan.
# ------------------------------------------------------------------------------


def need_of(
    request: Request,
    cache_spans: Sequence[CacheSpan],
    twins: Collection[int],
    rules: ReuseRules,
    store: Store,
) -> Need:
    """Return the largest need of a request, with all possible copies; its last token is never
    computed.

    `twins`  indices of the cache spans that read the KV of an equal earlier span
    """
    spans = [cache_span for cache_span in cache_spans if cache_span.independent]
    copies = 0  # at most
    if rules.copies:
        copies = sum(cache_span.stop - cache_span.start for cache_span in spans)
    elif rules.repair.kind != "none":
        reused = [
            ReusedSpan(cache_span.start, cache_span.stop, 0)
            for cache_span in spans
            if not cache_span.exact
        ]
        copies = rules.repair.private(reused, store.tree.block_size)
    shared = sum(cache_spans[index].stop - cache_spans[index].start for index in twins)
    tokens = request.num_tokens - shared + request.output_len - 1 + copies
    states = 1 + rules.cache.hold_state  # the running state, and the newest stored one
    states += 0 if rules.progress is None else rules.progress.max_states(request.output_len)
    running = rules.state_bytes_saved + rules.working_map_bytes * bool(spans)
    state = (states * store.state_bytes + running) * rules.needs_states
    sequences = len(cache_spans) - len(twins) + len(spans) * (copies > 0)
    return Need(tokens, copies, sequences, tokens * store.token_bytes, state)


def private_tokens(plan: ReusePlan, rules: ReuseRules, block_size: int) -> int:
    """Return the KV tokens of a plan that need private copies, because stored KV must not be
    overwritten."""
    if rules.copies:
        return sum(span_plan.to_copy for span_plan in plan.cache_spans)
    return 0 if rules.repair.kind == "none" else rules.repair.private(plan.spans, block_size)


def working_map_bytes(plan: ReusePlan, rules: ReuseRules) -> int:
    """Return the bytes of the working map while a span of a plan is computed; 0 if none is."""
    computes = any(
        span_plan.cache_span.independent and not span_plan.fully_reused
        for span_plan in plan.cache_spans
    )
    return rules.working_map_bytes if computes else 0


# ------------------------------------------------------------------------------
# A cap on the states of one path, so that the checkpoints of one long prompt do not displace
# all others.
#
# Source: sgl-project/sglang#31230. The cap is soft: states that other requests are likely to
# need are not dropped.
# ------------------------------------------------------------------------------


def excess_states(end: Node, limit: int) -> list[State]:
    """Return the states to drop from a path with more than `limit` states, shallowest first.

    The deepest state of the path is not dropped, nor are states in use, nor states at the end of a
    leaf or at a fork, where several stored prefixes continue.
    """
    path = list(end.path())
    states = [state for node in reversed(path) for state in node.states]
    excess = len(states) - limit
    if excess <= 0:
        return []
    dropped = []
    for state in states[:-1]:
        node = state.node
        assert node is not None, "a state of the tree has a node"
        is_end = state.position == node.depth and len(node.children) != 1
        if not (state.locks or is_end):
            dropped.append(state)
    return dropped[:excess]


# ------------------------------------------------------------------------------
# States of a running request: reserved states that it will store, and locked states that it
# reads.
# ------------------------------------------------------------------------------


class RequestStates:
    """Updates the states of allocations together with the store's locks and reserved bytes."""

    def __init__(self, rules: ReuseRules, store: Store, captures: Captures) -> None:
        self._rules, self._store, self._captures = rules, store, captures

    def follow(self, allocation: TreeAllocation, start: int, stop: int) -> None:
        """Add the captures of computing tokens `[start, stop)`, as far as memory allows."""
        progress, captures, store = self._rules.progress, allocation.captures, self._store
        if progress is None:
            return
        assert self._rules.keeps, "states are followed only where they are stored"
        for position in progress.positions(allocation.plan.prompt, start, stop):
            replaced = captures[-1] if captures and captures[-1] > allocation.plan.prompt else None
            if position in captures:
                continue
            if replaced is not None and not progress.stays(replaced):
                captures[-1] = position
            elif store.spare_state_bytes() >= store.state_bytes and store.reserve(
                0, store.state_bytes
            ):
                insort(captures, position)
                allocation.state_bytes += store.state_bytes

    def take_captures(self, allocation: TreeAllocation, span: CacheSpan, stop: int) -> list[int]:
        """Remove the captures of a cache span up to `stop` and unreserve their bytes; return them
        in span tokens."""
        first, last = (
            bisect_right(allocation.captures, span.start + length) for length in (0, stop)
        )
        positions = [position - span.start for position in allocation.captures[first:last]]
        state_bytes = len(positions) * self._captures.bytes_in(span)
        self._store.unreserve(0, state_bytes)
        allocation.state_bytes -= state_bytes
        del allocation.captures[first:last]
        allocation.captured += len(positions)
        allocation.captured_maps += len(positions) * span.independent
        return positions

    def after_insert(self, allocation: TreeAllocation, node: Node) -> None:
        """Lock the newest stored state, and enforce the cap of states per path."""
        if self._rules.cache.hold_state:
            # lock the newest state of a request's path, if its node has one at its end
            self.unlock(allocation)
            state = node.deepest_state(node.depth)
            if state is not None and state.position == node.depth:
                self._store.lock_state(state)
                allocation.states = [state]
        if self._rules.cache.states_per_path is not None:
            self._store.drop_states(excess_states(node, self._rules.cache.states_per_path))

    def unlock(self, allocation: TreeAllocation) -> None:
        """Unlock the states of an allocation after they were read."""
        for state in allocation.states:
            self._store.unlock_state(state)
        allocation.states = []

    def release_reserved(self, allocation: TreeAllocation) -> None:
        """Unreserve the bytes of states that were not inserted, and of the working map of a
        span."""
        spare = allocation.working_map + self._captures.bytes_of(
            allocation.plan, allocation.captures
        )
        self._store.unreserve(0, spare)
        allocation.state_bytes -= spare
        allocation.working_map, allocation.captures = 0, []


class TreePolicy:
    """Matches each prompt with the trees, and stores what is computed of it."""

    def __init__(
        self,
        rules: ReuseRules,
        store: Store,
        index: PrefixIndex,
        placer: Placer,
        ledger: Ledger | None = None,
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

    def start_step(self, now: int) -> None:
        """Set the time of the store."""
        self.store.note(now)

    # -- matching ----------------------------------------------------------------------------------

    def match(self, request: Request, now: int, generated: int = 0) -> ReusePlan:
        """Return the reuse of the prompt and the causes of lost tokens; read-only."""
        return self._matcher.plan(request)

    # -- allocating --------------------------------------------------------------------------------

    def allocate(
        self, plan: ReusePlan, now: int, generated: int = 0, drafts: int = 0
    ) -> TreeAllocation | None:
        """Lock the reused entries and reserve memory for computed ones; None, and no change, where
        that does not fit.

        A preempted request resumes with `generated` output tokens; their KV is reserved too, and
        that of `drafts` tokens after them.
        """
        store, rules = self.store, self.rules
        stored, states = self._stored_reads(plan)
        shared = sum(
            [span_plan.resume for span_plan in plan.cache_spans if span_plan.twin is not None]
        )
        private = private_tokens(plan, rules, store.tree.block_size)
        reserved_to = plan.prompt + generated + drafts
        kv = (reserved_to - sum(stored) - shared + private) * store.token_bytes
        paths = [
            (span_plan.match_node, length)
            for span_plan, length in zip(plan.cache_spans, stored, strict=True)
        ]
        links = {
            index: span_plan.link
            for index, span_plan in enumerate(plan.cache_spans)
            if span_plan.link is not None
        }
        paths += [(link, link.depth) for link in links.values()]
        working_map = working_map_bytes(plan, rules)
        state_bytes = working_map + (
            store.state_bytes + rules.state_bytes_saved if rules.needs_states else 0
        )
        if not store.fits_with_locks(paths, states, kv, state_bytes):
            return None
        store.note(now, plan.request)
        store.on_admission(plan.request)
        nodes = [
            self._lock_path(plan.request, *path)
            for path in zip(plan.cache_spans, stored, strict=True)
        ]
        for state in states:
            store.lock_state(state)
        for link in links.values():
            store.lock(link)
            store.touch(link, link.depth)
        for span_plan, node in zip(plan.cache_spans, nodes, strict=True):  # before `reserve` evicts
            on_match = rules.cache.touch == "match"
            store.touch(
                *((span_plan.match_node, span_plan.matched) if on_match else (node, node.depth))
            )
            if span_plan.resume_state is not None:
                store.touch_state(span_plan.resume_state)
        granted = store.reserve(kv, state_bytes)
        assert granted, "`fits_with_locks` has counted these bytes"
        if not generated:
            for span_plan in plan.cache_spans:
                if span_plan.losses.kv_evicted:
                    span, matched = span_plan.cache_span, span_plan.matched
                    self.ledger.missed(
                        self.index.key(plan.request, span),
                        span.tokens,
                        matched,
                        span.stop - span.start,
                    )
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

    def _stored_reads(self, plan: ReusePlan) -> tuple[list[int], list[State]]:
        """Return what a request reads from the store: tokens by cache span, and states."""
        return [span_plan.stored for span_plan in plan.cache_spans], plan.states

    def _lock_path(self, request: Request, span_plan: CacheSpanPlan, length: int) -> Node:
        """Lock exactly the tokens that are read: split a longer edge, so that its suffix can be
        evicted."""
        store, tokens = self.store, span_plan.cache_span.tokens
        start = span_plan.resume_node
        if start.parent is None:
            start = self.index.insertion_root(request, span_plan.cache_span)
        if self.rules.cache.touch == "resume" and self.rules.needs_states:
            # in whole blocks, without the last token of the cache span
            block_size = store.tree.block_size
            span = span_plan.cache_span
            matched = min(span_plan.matched, span.stop - span.start - 1)
            store.cut(start, tokens, matched // block_size * block_size)
        node = store.cut(start, tokens, length)
        store.lock(node)
        return node

    def _plan_captures(self, plan: ReusePlan, now: int) -> list[int]:
        """Return the positions of states that this prefill stores: on the grid, computed here, as
        many as fit."""
        if not self.rules.needs_states or not self.rules.keeps:
            return []
        store, request = self.store, plan.request
        prefill = PrefillInfo(
            *prefix_lengths(plan), request.boundaries, request, now, store.free_bytes
        )
        self.placer.observe(prefill)
        placed = self.placer.place(prefill)
        captures: list[int] = []
        for span_plan in plan.cache_spans:
            captures += self._captures.positions(span_plan, placed, self._computed_from(span_plan))
        return self._captures.deepest(plan, captures, store.spare_state_bytes())

    def _computed_from(self, span_plan: CacheSpanPlan) -> int:
        """Return the tokens of a cache span that are not computed; states can be captured only
        after them."""
        return span_plan.resume

    def chunk_end(self, plan: ReusePlan, start: int, stop: int, most: int, generated: int) -> int:
        """Return `stop`: a chunk may end anywhere."""
        return stop

    def append(self, allocation: TreeAllocation, start: int, stop: int, drafts: int = 0) -> bool:
        """Reserve KV of output tokens; KV of the prompt, and of output before a preemption, is
        reserved already."""
        missing = (stop + drafts - allocation.reserved_to) * self.store.token_bytes
        if missing > 0:
            if not self.store.reserve(missing, 0):
                return False
            allocation.kv_bytes += missing
            allocation.reserved_to = stop + drafts
        self._states.follow(allocation, start, stop)
        return True

    def repeat(self, batch: DecodeBatch, times: int, before: BeforeChange = unnoticed) -> None:
        """Reserve `times` more tokens for each allocation, at once where nothing is evicted for
        them."""
        # tokens of each allocation that are reserved already
        token_bytes, slack, needed = self.store.token_bytes, list[int](), 0
        allocation: TreeAllocation
        for allocation, base in batch.members.values():
            spare = allocation.reserved_to - base - batch.steps
            slack.append(spare)
            if spare < times:
                needed += times - spare
                allocation.kv_bytes += (times - spare) * token_bytes
                allocation.reserved_to += times - spare
        if needed * token_bytes <= self.store.free_bytes():
            granted = self.store.reserve(needed * token_bytes, 0)
            assert granted, "that many bytes are free"
        else:
            self._reserve_stepwise(slack, times, before)
        if self.rules.progress is not None:
            for allocation, base in batch.members.values():
                start = base + batch.steps
                self._states.follow(allocation, start, start + times)

    def _reserve_stepwise(self, slack: list[int], times: int, before: BeforeChange) -> None:
        """Reserve the tokens of `times` steps, at once up to each step that evicts."""
        token_bytes = self.store.token_bytes
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

    def _steps_without_eviction(self, slack: list[int], reserved: int, times: int) -> int:
        """Return the most steps, up to `times`, whose tokens beside `reserved` ones fit into free
        memory."""
        free, token_bytes = self.store.free_bytes(), self.store.token_bytes
        if (_tokens_after(slack, times) - reserved) * token_bytes <= free:
            return times
        return (
            bisect_right(
                range(times),
                free,
                key=lambda steps: (_tokens_after(slack, steps) - reserved) * token_bytes,
            )
            - 1
        )

    def spare_steps(self, batch: DecodeBatch) -> int:
        """Return the number of tokens that certainly fit for each allocation of a batch."""
        return self.store.spare_tokens() // len(batch.sequences)

    def futile_steps(self, request: Request, batch: DecodeBatch) -> int:
        """Return `UNLIMITED`: decoding alone frees nothing."""
        return UNLIMITED

    # -- inserting ---------------------------------------------------------------------------------

    def insert(
        self, allocation: TreeAllocation, computed: int, now: int, cache_span: int = 0
    ) -> None:
        """Store a cache span up to prompt token `computed`, in the bytes that the request has
        reserved."""
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
            stop = max(
                (position for position in allocation.captures if position <= stop), default=0
            )
        if self.rules.keeps and self._may_store(complete):
            if stop > allocation.stored[cache_span]:
                self._insert(allocation, cache_span, stop, span.tokens)
            elif (
                self._inserts_states_alone
                and allocation.captures
                and allocation.captures[0] <= stop
            ):
                # a replay has captured states on a path whose KV is stored already
                node = allocation.nodes[cache_span]
                positions = self._states.take_captures(allocation, span, stop)
                self.store.insert(
                    node, span.tokens, node.depth, positions, self._captures.bytes_in(span)
                )
                self._states.after_insert(allocation, node)
        self.ledger.computed(self._key(allocation, cache_span), span.tokens, length)
        if complete:
            self._states.release_reserved(allocation)

    def _may_store(self, complete: bool) -> bool:
        """Whether a prompt may be stored now; `complete`: all of it is computed."""
        return True

    def _insertion_start(self, allocation: TreeAllocation, cache_span: int) -> Node:
        """Return the node below which new tokens of a cache span are stored."""
        return allocation.nodes[cache_span]

    def _insert(
        self, allocation: TreeAllocation, cache_span: int, stop: int, tokens: TokenString
    ) -> None:
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

    def _key(self, allocation: TreeAllocation, cache_span: int) -> RootKey:
        return self.index.key(
            allocation.plan.request, allocation.plan.cache_spans[cache_span].cache_span
        )

    def finish(self, allocation: TreeAllocation, generated: int, now: int) -> None:
        """Store output tokens after the prompt, in a hybrid up to the last state, where alone it
        can resume."""
        self.store.note(now, allocation.plan.request)
        if self.rules.cache.age_by == "finish":
            self._refresh(allocation)
        if self.rules.needs_states:
            generated = (
                max(0, allocation.captures[-1] - allocation.plan.prompt)
                if allocation.captures
                else 0
            )
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
        """Set the age of the KV that a request used, and of the states that it read or stored, to
        now."""
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
        """Return the largest memory of one request, with all possible copies; its last token is
        never computed."""
        cache_spans = self.layout(request)
        return need_of(
            request, cache_spans, self._matcher.repeats(cache_spans), self.rules, self.store
        )

    def extra_stored_tokens(self, request: Request) -> int:
        """Return the maximum number of tokens that are stored beside the cache spans of a
        prompt."""
        return 0

    def checkpoints(self, request: Request) -> list[int]:
        """Return the positions of the stored states along a prompt, increasing."""
        positions = []
        for cache_span in self.layout(request):
            node, _ = self.index.find(request, cache_span)
            positions += [
                cache_span.start + state.position for step in node.path() for state in step.states
            ]
        return sorted(positions)

    def check(self) -> None:
        """Verify the store by recounting."""
        recount(self.store, self.index.all())


def _tokens_after(slack: list[int], steps: int) -> int:
    """Return the tokens that allocations need after some steps, beside those that they have
    reserved already."""
    return sum([steps - spare for spare in slack if steps > spare])

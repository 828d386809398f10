"""Variants of the tree policy: admission, pinning, kept repairs, exact hashes and the published
study."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

from spanlab.core.admission import Admission, ComputedPrefix
from spanlab.core.ledger import Ledger
from spanlab.core.placement.rules import Placer
from spanlab.core.plan import CacheSpanPlan, DecodeBatch, ReusePlan, TreeAllocation, combine_plans
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request
from spanlab.core.rules import ReuseRules
from spanlab.core.store import Store
from spanlab.core.token_string import TokenString
from spanlab.core.tree import (
    CacheSpan,
    Node,
    PrefixIndex,
    PrefixTree,
    RootKey,
    SharedIndex,
    State,
    root_name,
    whole,
)

# ------------------------------------------------------------------------------
# A tree policy that stores only the tokens that an admission rule admits.
# ------------------------------------------------------------------------------


class AdmittingPolicy(TreePolicy):
    """Stores the admitted part of a prompt's prefix or spans, in whole blocks."""

    def __init__(
        self,
        rules: ReuseRules,
        store: Store,
        index: PrefixIndex,
        placer: Placer,
        admission: Admission,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(rules, store, index, placer, ledger)
        self._admission = admission

    def _insert(
        self, allocation: TreeAllocation, cache_span: int, stop: int, tokens: TokenString
    ) -> None:
        key, block_size = self._key(allocation, cache_span), self.store.tree.block_size
        admitted = self._admission.admit(ComputedPrefix(key, tokens, stop, allocation.plan.request))
        admitted = min(stop, admitted) // block_size * block_size
        if admitted < stop:
            self.ledger.refused(key, tokens, stop)
        if admitted > allocation.stored[cache_span]:
            super()._insert(allocation, cache_span, admitted, tokens)

    def finish(self, allocation: TreeAllocation, generated: int, now: int) -> None:
        """Store admitted output tokens, and report the request's cache spans to the admission
        rule."""
        super().finish(allocation, generated, now)
        for index, span_plan in enumerate(allocation.plan.cache_spans):
            self._admission.ended(self._key(allocation, index), span_plan.cache_span.tokens)


# ------------------------------------------------------------------------------
# A tree policy with pins: the eviction order locks recently used entries until their time to
# live is over.
#
# Pinned memory counts as memory in use: a waiting request is not admitted while pins leave too
# little memory. Pins are released early, in order of their end, in two cases: if no request
# runs, so that the server never stalls, and if a running request needs memory, so that no other
# running request is preempted for it.
# ------------------------------------------------------------------------------


class Pin(NamedTuple):
    """Locked paths and states of one request; `number` counts pins in order of creation."""

    number: int
    nodes: list[Node]
    states: list[State]


class Pins:
    """Pins of a store, by their end time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pin_of: dict[int, Pin] = {}
        self._num_created = 0
        # heap of (end, number, request); may contain released pins
        self._end_heap: list[tuple[int, int, int]] = []

    def pin(self, request: Request, nodes: list[Node], ends: int) -> None:
        """Lock paths, and the deepest state of each, until `ends`; replace an earlier pin of the
        request."""
        states = [state for node in nodes if (state := node.deepest_state(node.depth)) is not None]
        self._num_created += 1
        new = Pin(self._num_created, list(nodes), states)
        for node in new.nodes:
            self._store.lock(node)
        for state in states:
            self._store.lock_state(state)
        self.release(request.id)
        self._pin_of[request.id] = new
        heapq.heappush(self._end_heap, (ends, self._num_created, request.id))

    def release(self, request: int) -> None:
        """Release the pin of a request, if it has one."""
        pin = self._pin_of.pop(request, None)
        if pin is None:
            return
        for state in pin.states:
            self._store.unlock_state(state)
        for node in pin.nodes:
            self._store.unlock(node)

    def expire(self, now: int) -> None:
        """Release all pins that have ended."""
        while self._end_heap and self._end_heap[0][0] <= now:
            self._release_first()

    def release_earliest(self) -> bool:
        """Release the pin that ends first; return False where there is none."""
        while self._end_heap:
            if self._release_first():
                return True
        return False

    def _release_first(self) -> bool:
        """Remove the first entry of the heap; return False where its pin was released already."""
        _, number, request = heapq.heappop(self._end_heap)
        pin = self._pin_of.get(request)
        if pin is None or pin.number != number:
            return False
        self.release(request)
        return True


class PinningPolicy(AdmittingPolicy):
    """The policy `tree` for a store whose eviction order has pins."""

    def __init__(
        self,
        rules: ReuseRules,
        store: Store,
        index: PrefixIndex,
        placer: Placer,
        admission: Admission,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(rules, store, index, placer, admission, ledger)
        assert store.pins is not None, "this policy needs an eviction order with pins"
        self._pin_rules, self._pins, self._num_running = store.pins, Pins(store), 0

    def futile_steps(self, request: Request, batch: DecodeBatch) -> int:
        """Return 0: a pin may end at any time."""
        return 0

    def start_step(self, now: int) -> None:
        """Release expired pins."""
        super().start_step(now)
        self._pins.expire(now)

    def allocate(
        self, plan: ReusePlan, now: int, generated: int = 0, drafts: int = 0
    ) -> TreeAllocation | None:
        """Allocate as without pins; release pins while no request runs and this one does not
        fit."""
        allocation = super().allocate(plan, now, generated, drafts)
        while allocation is None and not self._num_running and self._pins.release_earliest():
            allocation = super().allocate(plan, now, generated, drafts)
        if allocation is None:
            return None
        self._num_running += 1
        for earlier in plan.request.after:
            self._pins.release(earlier)
        if self._pin_rules.on == "read":
            self._pins.pin(plan.request, allocation.nodes, now + self._pin_rules.ttl_ns)
        return allocation

    def append(self, allocation: TreeAllocation, start: int, stop: int, drafts: int = 0) -> bool:
        """Reserve KV of output tokens; release pins while it does not fit."""
        granted = super().append(allocation, start, stop, drafts)
        while not granted and self._pins.release_earliest():
            granted = super().append(allocation, start, stop, drafts)
        return granted

    def finish(self, allocation: TreeAllocation, generated: int, now: int) -> None:
        """Store the output, and pin the entries of a request with a successor."""
        super().finish(allocation, generated, now)
        if allocation.plan.request.id in self._pin_rules.continued:
            self._pins.pin(allocation.plan.request, allocation.nodes, now + self._pin_rules.ttl_ns)

    def free(self, allocation: TreeAllocation, now: int) -> None:
        """Free an allocation; its pin remains."""
        super().free(allocation, now)
        self._num_running -= 1


# ------------------------------------------------------------------------------
# Stored repairs: the repaired tokens of a span are stored under the text before the span.
#
# A repair of a span's first tokens (LegoLink) computes their KV with attention to all earlier
# tokens. That KV is a function of the tokens up to there, so that a prompt with the same
# passages in the same order reuses it without a repair. It is stored beside the span, whose
# other tokens are read as usual. IBM's branch of vLLM also stores repaired blocks as copies
# that depend on the prefix.
# ------------------------------------------------------------------------------


class KeptRepairsPolicy(TreePolicy):
    """A tree of spans that also stores repaired first blocks, as entries that are counted, locked
    and evicted."""

    def match(self, request: Request, now: int, generated: int = 0) -> ReusePlan:
        """Match as the tree policy, without a repair where its result is stored."""
        plan = super().match(request, now, generated)
        span_plans = list(plan.cache_spans)
        for index, link in self._links(plan).items():
            node, matched = self.index.find(request, link)
            if matched == len(link.tokens):
                span_plans[index] = span_plans[index]._replace(link=node)
        return combine_plans(request, plan.prompt, tuple(span_plans), plan.repair)

    def _links(self, plan: ReusePlan) -> dict[int, CacheSpan]:
        """Return, by cache span, the first blocks that a repair writes, hashed with all earlier
        tokens and the repair.

        The repair of a span that is shorter than these blocks is not stored.
        """
        block_size, repair = self.store.tree.block_size, plan.repair
        length = -(-repair.tokens // block_size) * block_size
        before = blake2b(b"repaired %d" % repair.tokens, digest_size=16)
        links: dict[int, CacheSpan] = {}
        for index, span_plan in enumerate(plan.cache_spans):
            span = span_plan.cache_span
            if not span.exact and len(span.tokens) >= length:
                start, tokens = span.start, span.tokens.cut(0, length)
                links[index] = CacheSpan(
                    start, start + length, False, tokens, before.digest(), start
                )
            before.update(b"%d,%d:" % (span.independent, span.stop - span.start))
            before.update(span.tokens.tobytes())
        return links

    def extra_stored_tokens(self, request: Request) -> int:
        """Return the tokens of the repairs of a request, which are computed in copies."""
        return self.need(request).copies

    def insert(
        self, allocation: TreeAllocation, computed: int, now: int, cache_span: int = 0
    ) -> None:
        """Store the computed tokens of a cache span, and the repairs once the prompt is
        complete."""
        super().insert(allocation, computed, now, cache_span)
        if computed < allocation.plan.prompt:
            return
        store = self.store
        for index, link in self._links(allocation.plan).items():
            if index in allocation.links:
                continue
            # repaired first blocks, in the bytes that the request has reserved for them
            length = len(link.tokens)
            root = self.index.insertion_root(allocation.plan.request, link)
            if not store.reserve_entry(root, link.tokens, length):
                continue
            store.unreserve(length * store.token_bytes, 0)
            allocation.kv_bytes -= length * store.token_bytes
            node = store.insert(root, link.tokens, length, (), 0)
            store.lock(node)
            allocation.links[index] = node


# ------------------------------------------------------------------------------
# A cache of whole prompts by the hash of all their tokens: only an exact repetition is a match.
# ------------------------------------------------------------------------------


class ExactHashPolicy(TreePolicy):
    """Stores prompts without output, because no later prompt equals a prompt with its output."""

    def _store_output(self, allocation: TreeAllocation, generated: int) -> None:
        """Do nothing: output tokens are not stored."""


class WholePromptIndex(SharedIndex):
    """One root per salt and whole prompt, so that prompts with a common prefix share nothing."""

    _MOST_KEYS = 1024

    def __init__(self, tree: PrefixTree) -> None:
        super().__init__(tree)
        # of the last requests: each is looked up in many steps
        self._keys: dict[int, tuple[Request, RootKey]] = {}

    def key(self, request: Request, cache_span: CacheSpan) -> RootKey:
        known = self._keys.get(request.id)
        if known is not None and known[0] is request:
            return known[1]
        key = request.cache_salt, 0, blake2b(cache_span.tokens.tobytes(), digest_size=16).digest()
        if len(self._keys) >= self._MOST_KEYS:
            self._keys.clear()
        self._keys[request.id] = request, key
        return key


# ------------------------------------------------------------------------------
# The store of private entries of the published sparse-prefix study (arXiv 2605.05219).
# ------------------------------------------------------------------------------


class PublishedStudyPolicy(TreePolicy):
    """Every complete request stores a private entry of its whole prompt with all states, computed
    or reused."""

    def __init__(
        self,
        rules: ReuseRules,
        store: Store,
        roots: PrivateIndex,
        placer: Placer,
        ledger: Ledger | None = None,
    ) -> None:
        assert rules.layout is whole, "a whole entry needs a prompt of one cache span"
        super().__init__(rules, store, roots, placer, ledger)
        self.stores_when_scheduled = False

    def _stored_reads(self, plan: ReusePlan) -> tuple[list[int], list[State]]:
        """Return no reads: a request reads a copy, so no stored entry is locked."""
        return [0] * len(plan.cache_spans), []

    def _lock_path(self, request: Request, span_plan: CacheSpanPlan, length: int) -> Node:
        return self.store.tree.new_root()

    def _computed_from(self, span_plan: CacheSpanPlan) -> int:
        return 0

    def _may_store(self, complete: bool) -> bool:
        return complete

    def _insertion_start(self, allocation: TreeAllocation, cache_span: int) -> Node:
        return self.index.insertion_root(
            allocation.plan.request, allocation.plan.cache_spans[cache_span].cache_span
        )

    def _store_output(self, allocation: TreeAllocation, generated: int) -> None:
        """Do nothing: output tokens are not stored."""


class PrivateIndex:
    """One root per stored request; a prompt is matched with the entries of its group, oldest first.

    Entries share nothing, and the oldest of equal matches is used.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._roots: dict[RootKey, list[Node]] = {}

    def key(self, request: Request, cache_span: CacheSpan) -> RootKey:
        return request.cache_salt, request.group_id, cache_span.parent_hash

    def find(self, request: Request, cache_span: CacheSpan) -> tuple[Node, int]:
        roots = [
            root for root in self._roots.get(self.key(request, cache_span), ()) if root.children
        ]
        matches = [self._tree.match(root, cache_span.tokens) for root in roots]
        return max(matches, key=lambda match: match[1], default=(self._tree.new_root(), 0))

    def insertion_root(self, request: Request, cache_span: CacheSpan) -> Node:
        key = self.key(request, cache_span)
        root = self._tree.new_root(root_name(key))
        stored = [other for other in self._roots.get(key, ()) if other.children]
        self._roots[key] = [*stored, root]
        return root

    def all(self) -> Iterable[Node]:
        return (root for roots in self._roots.values() for root in roots)

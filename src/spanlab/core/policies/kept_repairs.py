"""Stored repairs: the repaired tokens of a span are stored under the text before the span.

A repair of a span's first tokens (LegoLink) computes their KV with attention to all earlier tokens. That KV is a
function of the tokens up to there, so that a prompt with the same passages in the same order reuses it without a
repair. It is stored beside the span, whose other tokens are read as usual. IBM's branch of vLLM also stores repaired
blocks as copies that depend on the prefix.
"""

from __future__ import annotations

from hashlib import blake2b

from spanlab.core.cache_spans import CacheSpan
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request
from spanlab.core.reuse import ReusePlan, TreeAllocation, combine_plans


class KeptRepairsPolicy(TreePolicy):
    """A tree of spans that also stores repaired first blocks, as entries that are counted, locked and evicted."""

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
        """Return, by cache span, the first blocks that a repair writes, hashed with all earlier tokens and the repair.

        The repair of a span that is shorter than these blocks is not stored.
        """
        block_size, repair = self.store.tree.block_size, plan.repair
        length = -(-repair.tokens // block_size) * block_size
        before = blake2b(b"repaired %d" % repair.tokens, digest_size=16)
        links: dict[int, CacheSpan] = {}
        for index, span_plan in enumerate(plan.cache_spans):
            span = span_plan.cache_span
            if not span.exact and len(span.tokens) >= length:
                links[index] = _link(span, length, before.digest())
            before.update(b"%d,%d:" % (span.independent, span.stop - span.start))
            before.update(span.tokens.tobytes())
        return links

    def extra_stored_tokens(self, request: Request) -> int:
        """Return the tokens of the repairs of a request, which are computed in copies."""
        return self.need(request).copies

    def insert(self, allocation: TreeAllocation, computed: int, now: int, cache_span: int = 0) -> None:
        """Store the computed tokens of a cache span, and the repairs once the prompt is complete."""
        super().insert(allocation, computed, now, cache_span)
        if computed >= allocation.plan.prompt:
            for index, link in self._links(allocation.plan).items():
                if index not in allocation.links:
                    self._store_link(allocation, index, link)

    def _store_link(self, allocation: TreeAllocation, index: int, link: CacheSpan) -> None:
        """Store repaired first blocks, in the bytes that the request has reserved for them."""
        store, length = self.store, len(link.tokens)
        root = self.index.insertion_root(allocation.plan.request, link)
        if not store.reserve_entry(root, link.tokens, length):
            return
        store.unreserve(length * store.token_bytes, 0)
        allocation.kv_bytes -= length * store.token_bytes
        node = store.insert(root, link.tokens, length, (), 0)
        store.lock(node)
        allocation.links[index] = node


def _link(span: CacheSpan, length: int, parent_hash: bytes) -> CacheSpan:
    start, tokens = span.start, span.tokens.cut(0, length)
    return CacheSpan(start, start + length, False, tokens, parent_hash, start)

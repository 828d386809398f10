"""Repairs that are kept: what a repair has left of a span is stored under the text that it was repaired behind.

A repair of a span's first tokens (LegoLink) computes their KV in view of everything before. That KV is a function of
the tokens up to there, so that a prompt with the same passages in the same order finds it, and pays for no repair. It
lies beside the span, whose other tokens are read where they always are. IBM's branch of vLLM stores repaired blocks as
copies that depend on the prefix, too.
"""

from __future__ import annotations

from hashlib import blake2b

from spanlab.core.cache_spans import CacheSpan
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request
from spanlab.core.reuse import CacheSpanPlan, ReusePlan, TreeAllocation, gather


class KeptRepairsPolicy(TreePolicy):
    """A tree of spans whose repaired beginnings, whole blocks, are entries like others: counted, locked and evicted."""

    def match(self, request: Request, now: int, generated: int = 0) -> ReusePlan:
        """As without, and no repair where its result is stored."""
        plan = super().match(request, now, generated)
        parts = list(plan.cache_spans)
        for at, link in self._links(plan).items():
            node, matched = self.index.find(request, link)
            if matched == len(link.tokens):
                parts[at] = parts[at]._replace(link=node)
        return gather(request, plan.prompt, tuple(parts), plan.repair)

    def _links(self, plan: ReusePlan) -> dict[int, CacheSpan]:
        """By cache span, the beginning that a repair writes to; its parent hash is of all before, and of the repair.

        A span that is shorter than these blocks keeps no repair.
        """
        block_size, repair = self.store.tree.block_size, plan.repair
        length = -(-repair.tokens // block_size) * block_size
        before = blake2b(b"repaired %d" % repair.tokens, digest_size=16)
        links: dict[int, CacheSpan] = {}
        for at, part in enumerate(plan.cache_spans):
            if not part.cache_span.exact and len(part.cache_span.tokens) >= length:
                links[at] = _link(part, length, before.digest())
            one = part.cache_span
            before.update(b"%d,%d:" % (one.independent, one.stop - one.start))
            before.update(one.tokens.tobytes())
        return links

    def kept_beside(self, request: Request) -> int:
        """Its repairs, which are made in copies."""
        return self.need(request).copies

    def insert(self, allocation: TreeAllocation, computed: int, now: int, cache_span: int = 0) -> None:
        """Keep what is computed of a cache span, and repairs once the prompt is complete."""
        super().insert(allocation, computed, now, cache_span)
        if computed >= allocation.plan.prompt:
            for at, link in self._links(allocation.plan).items():
                if at not in allocation.links:
                    self._keep(allocation, at, link)

    def _keep(self, allocation: TreeAllocation, at: int, link: CacheSpan) -> None:
        """Store a repaired beginning; the bytes that the request has reserved for it change owner."""
        store, length = self.store, len(link.tokens)
        root = self.index.insertion_root(allocation.plan.request, link)
        if not store.reserve_entry(root, link.tokens, length):
            return
        store.unreserve(length * store.token_bytes, 0)
        allocation.kv_bytes -= length * store.token_bytes
        node = store.insert(root, link.tokens, length, (), 0)
        store.lock(node)
        allocation.links[at] = node


def _link(part: CacheSpanPlan, length: int, parent_hash: bytes) -> CacheSpan:
    start, tokens = part.cache_span.start, part.cache_span.tokens.cut(0, length)
    return CacheSpan(start, start + length, False, tokens, parent_hash, start)

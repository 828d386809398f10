"""Memory that one request needs in a store of trees: the maximum, and that of one plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from spanlab.core.cache_spans import CacheSpan
from spanlab.core.need import Need
from spanlab.core.repair import ReusedSpan
from spanlab.core.request import Request
from spanlab.core.reuse import ReusePlan
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.store import Store


def need_of(
    request: Request, cache_spans: Sequence[CacheSpan], twins: Collection[int], rules: ReuseRules, store: Store
) -> Need:
    """Return the largest need of a request, with all possible copies; its last token is never computed.

    `twins`  indices of the cache spans that read the KV of an equal earlier span
    """
    spans = [cache_span for cache_span in cache_spans if cache_span.independent]
    copies = _copies(spans, rules, store.tree.block_size)
    shared = sum(cache_spans[index].stop - cache_spans[index].start for index in twins)
    tokens = request.num_tokens - shared + request.output_len - 1 + copies
    states = 1 + rules.cache.hold_state  # the running state, and the newest stored one
    states += 0 if rules.progress is None else rules.progress.max_states(request.output_len)
    running = rules.state_bytes_saved + rules.working_map_bytes * bool(spans)
    state = (states * store.state_bytes + running) * rules.needs_states
    sequences = len(cache_spans) - len(twins) + len(spans) * (copies > 0)
    return Need(tokens, copies, sequences, tokens * store.token_bytes, state)


def _copies(spans: Sequence[CacheSpan], rules: ReuseRules, block_size: int) -> int:
    """Return the maximum number of span tokens that a request copies."""
    if rules.copies:
        return sum(cache_span.stop - cache_span.start for cache_span in spans)
    reused = [ReusedSpan(cache_span.start, cache_span.stop, 0) for cache_span in spans if not cache_span.exact]
    return 0 if rules.repair.kind == "none" else rules.repair.private(reused, block_size)


def private_tokens(plan: ReusePlan, rules: ReuseRules, block_size: int) -> int:
    """Return the KV tokens of a plan that need private copies, because stored KV must not be overwritten."""
    if rules.copies:
        return sum(span_plan.to_copy for span_plan in plan.cache_spans)
    return 0 if rules.repair.kind == "none" else rules.repair.private(plan.spans, block_size)


def working_map_bytes(plan: ReusePlan, rules: ReuseRules) -> int:
    """Return the bytes of the working map while a span of a plan is computed; 0 if none is."""
    computes = any(span_plan.cache_span.independent and not span_plan.fully_reused for span_plan in plan.cache_spans)
    return rules.working_map_bytes if computes else 0

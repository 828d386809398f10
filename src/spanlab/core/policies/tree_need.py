"""Memory that one request needs of a store of trees: at most, and for one plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from spanlab.core.cache_spans import CacheSpan
from spanlab.core.need import Need
from spanlab.core.repair import Reused
from spanlab.core.request import Request
from spanlab.core.reuse import ReusePlan
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.store import Store


def need_of(
    request: Request, cache_spans: Sequence[CacheSpan], twins: Collection[int], rules: ReuseRules, store: Store
) -> Need:
    """Its need if all that it may copy is copied; its last token is never computed.

    `twins`  numbers of the cache spans that read what an earlier one computes
    """
    spans = [cache_span for cache_span in cache_spans if cache_span.independent]
    copies = _copies(spans, rules, store.tree.block_size)
    shared = sum(cache_spans[at].stop - cache_spans[at].start for at in twins)
    tokens = request.num_tokens - shared + request.output_len - 1 + copies
    states = 1 + rules.cache.hold_state  # the running one, and the newest one that is stored
    states += 0 if rules.progress is None else rules.progress.most_held(request.output_len)
    running = rules.state_bytes_saved + rules.working_map_bytes * bool(spans)
    state = (states * store.state_bytes + running) * rules.needs_states
    sequences = len(cache_spans) - len(twins) + len(spans) * (copies > 0)
    return Need(tokens, copies, sequences, tokens * store.token_bytes, state)


def _copies(spans: Sequence[CacheSpan], rules: ReuseRules, block_size: int) -> int:
    """Tokens of spans that a request may copy."""
    if rules.copies:
        return sum(cache_span.stop - cache_span.start for cache_span in spans)
    reused = [Reused(cache_span.start, cache_span.stop, 0) for cache_span in spans if not cache_span.exact]
    return 0 if rules.repair.kind == "none" else rules.repair.private(reused, block_size)


def own_tokens(plan: ReusePlan, rules: ReuseRules, block_size: int) -> int:
    """KV tokens that a plan needs for what may not be written in place."""
    if rules.copies:
        return sum(part.to_copy for part in plan.cache_spans)
    return 0 if rules.repair.kind == "none" else rules.repair.private(plan.spans, block_size)


def working_map_bytes(plan: ReusePlan, rules: ReuseRules) -> int:
    """Bytes of the map that grows while a span of a plan is computed."""
    computes = any(part.cache_span.independent and not part.whole for part in plan.cache_spans)
    return rules.working_map_bytes if computes else 0

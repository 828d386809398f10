"""Match of a prompt with the trees: reusable tokens, and the causes of tokens that are not reused."""

from __future__ import annotations

from spanlab.core.cache_spans import CacheSpan, repeats, without_tails
from spanlab.core.ledger import Ledger
from spanlab.core.policies.captures import Captures
from spanlab.core.prefix_index import PrefixIndex
from spanlab.core.recovery import Replay
from spanlab.core.request import Request
from spanlab.core.reuse import CacheSpanPlan, Losses, ReusePlan, combine_plans
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.tree import Node, State


class Matcher:
    """Matches prompts with the trees; read-only."""

    def __init__(
        self, rules: ReuseRules, block_size: int, index: PrefixIndex, captures: Captures, ledger: Ledger
    ) -> None:
        self._rules, self._block_size, self._index, self._captures = rules, block_size, index, captures
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
        """Return the cache spans of a request; cached for the head of the queue, which is matched repeatedly."""
        if request is not self._last_layout[0]:
            self._last_layout = request, self.layout(request)
        return self._last_layout[1]

    def repeats(self, cache_spans: tuple[CacheSpan, ...]) -> dict[int, int]:
        """Return the spans that read the KV of an equal earlier span, as in `cache_spans.repeats`; none in a hybrid."""
        return repeats(cache_spans) if self._rules.keeps and not self._rules.needs_states else {}

    def _match_span(self, request: Request, cache_span: CacheSpan, last: bool) -> CacheSpanPlan:
        length = cache_span.stop - cache_span.start
        node, matched = self._index.find(request, cache_span)
        seen, refused = self._ledger.lookup(self._index.key(request, cache_span), cache_span.tokens)
        seen = max(seen, matched)
        limit = length - 1 if last and not self._rules.last_token else length
        state, resume = self._resume(node, min(matched, limit))
        resumable = resume if matched <= limit else self._resume(node, matched)[1]
        unit = self._captures.unit(cache_span)
        losses = self._losses(unit, length, seen, refused, min(seen, limit), matched, resume, node)
        anchor = node
        while anchor.depth > resume:
            assert anchor.parent is not None, "the root ends at zero"
            anchor = anchor.parent
        plan = CacheSpanPlan(cache_span, seen, matched, resumable, resume, losses, node, anchor, state)
        return plan if self._rules.replay is None else self._with_replay(plan, self._rules.replay, min(matched, limit))

    def _with_replay(self, plan: CacheSpanPlan, replay: Replay, limit: int) -> CacheSpanPlan:
        """Return the plan with the KV up to `limit`, in whole blocks, that a replay reads."""
        stop = limit // self._block_size * self._block_size
        return plan._replace(replayed=replay.tokens(stop - plan.resume))

    def _resume(self, node: Node, limit: int) -> tuple[State | None, int]:
        """Return the state to resume from, None for attention alone, and the deepest resume position within `limit`."""
        if not self._rules.needs_states:
            return None, self._usable(limit, self._block_size)
        state = node.deepest_state(limit)
        return state, 0 if state is None else state.position

    def _usable(self, tokens: int, unit: int) -> int:
        """Return how many of the matched tokens are reused: whole units, without the last one with `drops_last`."""
        return max(0, tokens // unit - self._rules.drops_last) * unit

    def _losses(
        self, unit: int, length: int, seen: int, refused: int, usable: int, matched: int, resume: int, node: Node
    ) -> Losses:
        """Attribute the tokens between the resume point and the end of the cache span to causes."""
        aligned = self._usable(usable, unit)
        never_seen, last_token, alignment = length - seen, seen - usable, usable - aligned
        if not self._rules.keeps:
            return Losses(never_seen, aligned, 0, 0, 0, alignment, last_token, 0)
        present = self._usable(min(matched, usable), unit)
        locked = max(0, min(refused, aligned) - present)
        tombstone = node.deepest_loss(resume, present) if resume < present else resume
        state_evicted, never_placed = tombstone - resume, present - tombstone
        kv_evicted = aligned - present - locked
        return Losses(never_seen, 0, kv_evicted, state_evicted, never_placed, alignment, last_token, locked)

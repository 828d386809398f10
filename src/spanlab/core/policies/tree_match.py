"""Match of a prompt with the trees: reusable tokens, and the causes of tokens that are not reused."""

from __future__ import annotations

from typing import NamedTuple

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
        usable = min(seen, limit)
        losses = Losses(length - seen, 0, 0, 0, 0, 0, seen - usable, 0)
        if usable > resume:
            evicted = self._ledger.evicted(self._index.key(request, cache_span), cache_span.tokens, matched, usable)
            match = _Match(unit, usable, min(matched, usable), resume, node)
            losses = self._losses(losses, match, refused, evicted)
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

    def _losses(self, losses: Losses, match: _Match, refused: int, evicted: int) -> Losses:
        """Attribute the tokens between the resume position and the end of the usable ones to causes.

        `refused`  tokens of the longest prefix that the store refused; `evicted` tokens behind the matched ones
        """
        aligned = self._usable(match.usable, match.unit)
        alignment = match.usable - aligned
        if not self._rules.keeps:
            return losses._replace(never_stored=aligned, alignment=alignment)
        present = self._usable(match.matched, match.unit)
        unaligned = min(
            match.matched % match.unit, aligned - present
        )  # present, in a unit of which the rest is missing
        missing = aligned - present - unaligned
        locked = min(max(0, refused - match.matched), missing)
        kv_evicted = min(evicted, missing - locked)
        tombstone = match.node.deepest_loss(match.resume, present) if match.resume < present else match.resume
        return losses._replace(
            never_stored=missing - locked - kv_evicted,
            kv_evicted=kv_evicted,
            state_evicted=tombstone - match.resume,
            state_never_placed=present - tombstone,
            alignment=alignment + unaligned,
            locked=locked,
        )


class _Match(NamedTuple):
    """A match: the unit of reuse, usable tokens, matched ones among them, the resume position and the deepest node."""

    unit: int
    usable: int
    matched: int
    resume: int
    node: Node

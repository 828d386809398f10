"""What a prompt can reuse of the trees at this moment, and what the rest of it is lost to."""

from __future__ import annotations

from spanlab.core.cache_spans import CacheSpan, repeats, without_tails
from spanlab.core.ledger import Ledger
from spanlab.core.policies.captures import Captures
from spanlab.core.prefix_index import PrefixIndex
from spanlab.core.recovery import Replay
from spanlab.core.request import Request
from spanlab.core.reuse import CacheSpanPlan, Losses, ReusePlan, gather
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.tree import Node, State


class Matcher:
    """Looks up prompts; it changes nothing that it reads."""

    def __init__(
        self, rules: ReuseRules, block_size: int, index: PrefixIndex, captures: Captures, ledger: Ledger
    ) -> None:
        self._rules, self._block_size, self._index, self._captures = rules, block_size, index, captures
        self._ledger = ledger
        self.layout = rules.layout if rules.repair.by_span else without_tails(rules.layout)
        self._cut: tuple[Request | None, tuple[CacheSpan, ...]] = (None, ())

    def plan(self, request: Request) -> ReusePlan:
        """How much of a prompt can be reused, and where the rest is lost."""
        cache_spans = self.cache_spans(request)
        last = len(cache_spans) - 1
        twins = self.repeats(cache_spans) if last else {}
        plans: list[CacheSpanPlan] = []
        for at, cache_span in enumerate(cache_spans):
            twin = twins.get(at)
            looked = (
                self._look(request, cache_span, at == last) if twin is None else plans[twin].repeated(cache_span, twin)
            )
            plans.append(looked)
        return gather(request, cache_spans[-1].stop, tuple(plans), self._rules.repair)

    def cache_spans(self, request: Request) -> tuple[CacheSpan, ...]:
        """A request's cache spans; the head of the queue, which is matched again and again, is cut once."""
        if request is not self._cut[0]:
            self._cut = request, self.layout(request)
        return self._cut[1]

    def repeats(self, cache_spans: tuple[CacheSpan, ...]) -> dict[int, int]:
        """Spans that read what an earlier one computes; the state runs through each of them where there is one."""
        return repeats(cache_spans) if self._rules.keeps and not self._rules.needs_states else {}

    def _look(self, request: Request, cache_span: CacheSpan, last: bool) -> CacheSpanPlan:
        length = cache_span.stop - cache_span.start
        node, matched = self._index.find(request, cache_span)
        seen, refused = self._ledger.known(self._index.key(request, cache_span), cache_span.tokens)
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
        looked = CacheSpanPlan(cache_span, seen, matched, resumable, resume, losses, node, anchor, state)
        return looked if self._rules.replay is None else self._replayed(looked, self._rules.replay, min(matched, limit))

    def _replayed(self, looked: CacheSpanPlan, replay: Replay, limit: int) -> CacheSpanPlan:
        """The same plan with the KV up to `limit`, whole blocks, that a replay reads."""
        whole = limit // self._block_size * self._block_size
        return looked._replace(replayed=replay.tokens(whole - looked.resume))

    def _resume(self, node: Node, limit: int) -> tuple[State | None, int]:
        """The deepest point within `limit` from which computation may restart, and its state where one is needed."""
        if not self._rules.needs_states:
            return None, self._usable(limit, self._block_size)
        state = node.deepest_state(limit)
        return state, 0 if state is None else state.position

    def _usable(self, tokens: int, unit: int) -> int:
        """How many of the tokens that match are read: whole units, and not the last one behind some drafters."""
        return max(0, tokens // unit - self._rules.drops_last) * unit

    def _losses(
        self, unit: int, length: int, seen: int, refused: int, usable: int, matched: int, resume: int, node: Node
    ) -> Losses:
        """Walk from the cache span's end to the resume point and name what each stretch was lost to."""
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

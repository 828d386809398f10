"""A tree policy that stores only the tokens that an admission rule admits."""

from __future__ import annotations

from spanlab.core.admission import Admission, ComputedPrefix
from spanlab.core.ledger import Ledger
from spanlab.core.placement import Placer
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.prefix_index import PrefixIndex
from spanlab.core.reuse import TreeAllocation
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.store import Store
from spanlab.core.token_string import TokenString


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

    def _insert(self, allocation: TreeAllocation, cache_span: int, stop: int, tokens: TokenString) -> None:
        key, block_size = self._key(allocation, cache_span), self.store.tree.block_size
        admitted = self._admission.admit(ComputedPrefix(key, tokens, stop, allocation.plan.request))
        admitted = min(stop, admitted) // block_size * block_size
        if admitted < stop:
            self.ledger.refused(key, tokens, stop)
        if admitted > allocation.stored[cache_span]:
            super()._insert(allocation, cache_span, admitted, tokens)

    def finish(self, allocation: TreeAllocation, generated: int, now: int) -> None:
        """Store admitted output tokens, and report the request's cache spans to the admission rule."""
        super().finish(allocation, generated, now)
        for index, span_plan in enumerate(allocation.plan.cache_spans):
            self._admission.ended(self._key(allocation, index), span_plan.cache_span.tokens)

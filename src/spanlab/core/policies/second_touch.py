"""Admission at the second touch: what is asked for once is not kept, so that it displaces nothing.

The doorkeeper of TinyLFU (arXiv 1512.00727), for prefixes and spans. The memory of what was touched holds no KV, and is
not limited here.
"""

from __future__ import annotations

from spanlab.core.ledger import Ledger
from spanlab.core.placement import Placer
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.prefix_index import PrefixIndex
from spanlab.core.reuse import TreeAllocation
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.store import Store
from spanlab.core.token_string import TokenString


class SecondTouchPolicy(TreePolicy):
    """Stores as much of a prompt's prefix or spans as an earlier request that has finished computed or read."""

    def __init__(
        self, rules: ReuseRules, store: Store, index: PrefixIndex, placer: Placer, ledger: Ledger | None = None
    ) -> None:
        super().__init__(rules, store, index, placer, ledger)
        self._touched = Ledger()  # not that of causes, which may be left out

    def _insert(self, allocation: TreeAllocation, cache_span: int, stop: int, tokens: TokenString) -> None:
        key, block_size = self._key(allocation, cache_span), self.store.tree.block_size
        admitted = min(stop, self._touched.known(key, tokens)[0] // block_size * block_size)
        if admitted < stop:
            self.ledger.refused(key, tokens, stop)
        if admitted > allocation.stored[cache_span]:
            super()._insert(allocation, cache_span, admitted, tokens)

    def finish(self, allocation: TreeAllocation, generated: int, now: int) -> None:
        """Keep output tokens that are known already, and note what this request has touched."""
        super().finish(allocation, generated, now)
        for at, part in enumerate(allocation.plan.cache_spans):
            tokens = part.cache_span.tokens
            self._touched.computed(self._key(allocation, at), tokens, len(tokens))

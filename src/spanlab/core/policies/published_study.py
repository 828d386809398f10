"""The store of private entries of the published sparse-prefix study (arXiv 2605.05219)."""

from __future__ import annotations

from collections.abc import Iterable

from spanlab.core.cache_spans import CacheSpan, whole
from spanlab.core.ledger import Ledger
from spanlab.core.placement import Placer
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.prefix_index import RootKey, root_name
from spanlab.core.request import Request
from spanlab.core.reuse import CacheSpanPlan, ReusePlan, TreeAllocation
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.store import Store
from spanlab.core.tree import Node, PrefixTree, State


class PublishedStudyPolicy(TreePolicy):
    """Every complete request stores a private entry of its whole prompt with all states, computed or reused."""

    def __init__(
        self, rules: ReuseRules, store: Store, roots: PrivateIndex, placer: Placer, ledger: Ledger | None = None
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
        return self.index.insertion_root(allocation.plan.request, allocation.plan.cache_spans[cache_span].cache_span)

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
        roots = [root for root in self._roots.get(self.key(request, cache_span), ()) if root.children]
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

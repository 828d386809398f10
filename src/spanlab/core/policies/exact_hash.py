"""A cache of whole prompts by the hash of all their tokens: only an exact repetition is a match."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from spanlab.core.cache_spans import CacheSpan
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.prefix_index import RootKey
from spanlab.core.request import Request
from spanlab.core.reuse import TreeAllocation
from spanlab.core.tree import Node, PrefixTree


class ExactHashPolicy(TreePolicy):
    """Stores prompts without output, because no later prompt equals a prompt with its output."""

    def _store_output(self, allocation: TreeAllocation, generated: int) -> None:
        """Do nothing: output tokens are not stored."""


class WholePromptIndex:
    """One root per salt and whole prompt, so that prompts with a common prefix share nothing."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._roots: dict[RootKey, Node] = {}

    def key(self, request: Request, cache_span: CacheSpan) -> RootKey:
        return request.cache_salt, 0, blake2b(cache_span.tokens.tobytes(), digest_size=16).digest()

    def find(self, request: Request, cache_span: CacheSpan) -> tuple[Node, int]:
        root = self._roots.get(self.key(request, cache_span))
        return (self._tree.new_root(), 0) if root is None else self._tree.match(root, cache_span.tokens)

    def insertion_root(self, request: Request, cache_span: CacheSpan) -> Node:
        return self._roots.setdefault(self.key(request, cache_span), self._tree.new_root())

    def all(self) -> Iterable[Node]:
        return self._roots.values()

"""Storage rules of caches with unlimited memory: reuse of equal prefixes, or of equal spans at any position."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from spanlab.core.cache_spans import CacheSpan, token_runs, whole
from spanlab.core.request import Request
from spanlab.core.reuse_rules import StorageRules
from spanlab.core.token_string import TokenString


def prefix_rules(last_token: bool = False, outputs: bool = False) -> StorageRules:
    """Return rules for reuse of any prefix of an earlier prompt with the same salt, token by token."""
    return StorageRules(whole, salted_parent, 1, last_token, outputs)


def any_position_rules(last_token: bool = False, outputs: bool = False) -> StorageRules:
    """Return rules for reuse of independent spans at any position, and of ordered text by parent hash."""
    return StorageRules(_Anywhere(), salted_parent, 1, last_token, outputs)


def salted_parent(request: Request, cache_span: CacheSpan) -> Hashable:
    """Return the key of a cache span: spans with equal salts and parent hashes share."""
    return request.cache_salt, cache_span.parent_hash


@dataclass
class _Anywhere:
    """The cache spans of `isolated`, with numbers in place of parent hashes, which is faster."""

    parents: dict[tuple[int, bool, TokenString], int] = field(default_factory=dict)

    def __call__(self, request: Request) -> tuple[CacheSpan, ...]:
        cache_spans, parent = [], 0
        for start, stop, independent, tokens in token_runs(request):
            name = b"" if independent or not start else b"%d" % parent
            cache_spans.append(CacheSpan(start, stop, independent, tokens, name, start))
            parent = self.parents.setdefault((parent, independent, tokens), len(self.parents) + 1)
        return tuple(cache_spans)

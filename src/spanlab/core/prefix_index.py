"""Lookup and storage of prefixes: one root per cache salt and parent hash."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from spanlab.core.cache_spans import CacheSpan
from spanlab.core.request import Request
from spanlab.core.tree import Node, PrefixTree

RootKey = tuple[str, int, bytes]


def root_name(key: RootKey) -> bytes:
    """Return the name of a root; different keys have different names."""
    return repr(key).encode()


class PrefixIndex(Protocol):
    """Finds the stored prefix that a cache span may share, and the root under which it is stored."""

    def key(self, request: Request, cache_span: CacheSpan) -> RootKey:
        """Return the key of a cache span; only cache spans with equal keys may share entries."""
        ...

    def find(self, request: Request, cache_span: CacheSpan) -> tuple[Node, int]:
        """Return the node that the longest match ends in, and its length in tokens."""
        ...

    def insertion_root(self, request: Request, cache_span: CacheSpan) -> Node:
        """Return the root under which the entry of this cache span is stored."""
        ...

    def all(self) -> Iterable[Node]: ...


def shared_name(request: Request, cache_span: CacheSpan) -> bytes:
    """Return the name of a cache span's root in a `SharedIndex`."""
    return root_name(_shared_key(request, cache_span))


def _shared_key(request: Request, cache_span: CacheSpan) -> RootKey:
    return request.cache_salt, 0, cache_span.parent_hash


class SharedIndex:
    """One root per salt and parent hash: equal tokens with equal parent hashes share their nodes."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._roots: dict[RootKey, Node] = {}

    def key(self, request: Request, cache_span: CacheSpan) -> RootKey:
        return _shared_key(request, cache_span)

    def find(self, request: Request, cache_span: CacheSpan) -> tuple[Node, int]:
        root = self._roots.get(self.key(request, cache_span))
        if root is None:
            return self._tree.new_root(), 0
        return self._tree.match(root, cache_span.tokens) if cache_span.storable else (root, 0)

    def insertion_root(self, request: Request, cache_span: CacheSpan) -> Node:
        key = self.key(request, cache_span)
        if key not in self._roots:
            self._roots[key] = self._tree.new_root(root_name(key))
        return self._roots[key]

    def all(self) -> Iterable[Node]:
        return self._roots.values()

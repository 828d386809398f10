"""Eviction orders as cache policies of vLLM, which keeps KV chunks in CPU memory
(`CachePolicyFactory`, 0.32 and 0.33).

With `cache_policy_module_path=spanlab.vllm_policy`, vLLM looks up `eviction_policy` here:
`spanlab_sieve` is the order `sieve` with its defaults. A policy with options, or a policy of a
plugin, is one line in a module that vLLM can import:

    protected = cache_policy("slru", protected=0.5)

vLLM's chunks have one size and leave in any order, so the tree that an order sees has one level:
each chunk is a leaf. Only `cache_policy` needs vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from spanlab.core.eviction import EVICTION_ORDERS, FUTURE, REQUESTS, EvictionRules
from spanlab.core.request import Budget
from spanlab.core.store import Store
from spanlab.core.token_string import string_of
from spanlab.core.tree import Node, PrefixTree
from spanlab.registry import one_of

PREFIX = "spanlab_"
WIDTH = 4  # tokens of four bytes that name a chunk in the tree: a digest of its key


class Chunk(Protocol):
    """vLLM's record of a chunk: `ref_cnt` is its number of readers, -1 while it is written."""

    ref_cnt: int


class Request(Protocol):
    """vLLM's record of a request."""

    def get_offload_key_position(self, key: bytes) -> int | None:
        """Return the end of a chunk in the prompt; None if unknown."""
        ...


class ChunkPolicy:
    """vLLM's interface `CachePolicy` over an eviction order; chunks that are written or read are
    locked.

    `order`    name of the eviction order
    `options`  options of the order, by name
    """

    order = "lru"
    options: Mapping[str, Any] = {}

    def __init__(self, cache_capacity: int) -> None:
        self.cache_capacity = cache_capacity
        self.clear()

    def clear(self) -> None:
        """Remove all chunks, and reset the eviction order."""
        self._tree = PrefixTree(WIDTH)
        budget = Budget(kv_bytes=self.cache_capacity * WIDTH)
        self._store = Store(self._tree, 1, 0, budget, self.order, EvictionRules(self.options))
        self._root = self._tree.new_root()
        self._chunks: dict[bytes, Chunk] = {}
        self._leaves: dict[bytes, Node] = {}
        self._keys: dict[Node, bytes] = {}

    def get(self, key: bytes) -> Chunk | None:
        """Return the chunk of a key; None if it is not stored."""
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: Chunk, req_context: Request | None = None) -> None:
        """Store a chunk, locked until it is written; since 0.33, vLLM names the request that stores
        it."""
        tokens = string_of([np.frombuffer(blake2b(key, digest_size=4 * WIDTH).digest(), np.int32)])
        leaf = self._store.insert(self._root, tokens, WIDTH, (), 0)
        self._chunks[key], self._leaves[key], self._keys[leaf] = chunk, leaf, key
        if chunk.ref_cnt:
            self._store.lock(leaf)

    def remove(self, key: bytes) -> None:
        """Remove a chunk that could not be written."""
        leaf = self._leaves[key]
        while leaf.locks:
            self._store.unlock(leaf)
        self._tree.remove(leaf)
        self._forget(leaf)

    def touch(self, keys: Iterable[bytes], req_context: Request) -> None:
        """Count a use of chunks in prefix order; the last chunk is the oldest."""
        for key in reversed(list(keys)):
            if key in self._leaves:
                self._store.touch(self._leaves[key], WIDTH)

    def on_request_access(self, keys: Iterable[bytes], req_context: Request) -> None:
        """Do nothing, since 0.33: a use counts when its request ends, in prefix order."""

    def on_store_miss(self, keys: Iterable[bytes], req_context: Request) -> None:
        """Do nothing: orders recognise a returning chunk when it is inserted."""

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Request,
    ) -> None:
        """Count a use of the chunks that a request has read, and renew the age of its other
        chunks."""
        keys = [key for group in key_groups for key in group]
        positions = ((key, req_context.get_offload_key_position(key)) for key in keys)
        ends = {key: end for key, end in positions if end is not None}
        if len(ends) == len(keys):
            keys.sort(key=ends.__getitem__)
        for key in reversed(keys):
            leaf = self._leaves.get(key)
            if leaf is not None and key in reused_keys:
                self._store.touch(leaf, WIDTH)
            elif leaf is not None:
                self._store.refresh(leaf, 0)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Chunk]] | None:
        """Evict `n` idle chunks that are not protected; return None, without a change, if there are
        fewer."""
        pinned = [
            leaf
            for key in protected
            if (leaf := self._leaves.get(key)) is not None and not leaf.locks
        ]
        idle = self._tree.num_leaves - self._store.kv_locked // WIDTH
        if idle - len(pinned) < n:
            return None
        for leaf in pinned:
            self._store.lock(leaf)
        removed = _Removed()
        self._tree.watchers.append(removed)
        self._store.evict(n * WIDTH, 0)
        self._tree.watchers.remove(removed)
        for leaf in pinned:
            self._store.unlock(leaf)
        return [self._forget(leaf) for leaf in removed.leaves]

    def mark_evictable(self, key: bytes) -> None:
        """Unlock a chunk that is no longer read or written."""
        self._store.unlock(self._leaves[key])

    def mark_non_evictable(self, key: bytes) -> None:
        """Lock a chunk that is read from now on."""
        self._store.lock(self._leaves[key])

    def _forget(self, leaf: Node) -> tuple[bytes, Chunk]:
        key = self._keys.pop(leaf)
        del self._leaves[key]
        return key, self._chunks.pop(key)


class _Removed:
    """Tree watcher that collects removed leaves in order."""

    def __init__(self) -> None:
        self.leaves: list[Node] = []

    def split(self, upper: Node, lower: Node) -> None:
        """Do nothing: a chunk is one block and is never split."""

    def removed(self, node: Node) -> None:
        self.leaves.append(node)


def cache_policy(order: str, **options: Any) -> type:
    """Return a class for vLLM's `CachePolicyFactory`; ValueError for an order that reads
    requests."""
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

    checked(order, options)
    content = {"__module__": __name__, "order": order, "options": options}
    return type(PREFIX + order, (ChunkPolicy, CachePolicy), content)


def checked(order: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an order that vLLM cannot run, and for unknown options."""
    unsupported = {*EVICTION_ORDERS.needing(FUTURE), *EVICTION_ORDERS.needing(REQUESTS)}
    one_of("eviction_policy", order, [name for name in EVICTION_ORDERS if name not in unsupported])
    EVICTION_ORDERS.check(
        "cache_policy.options", order, f"cache_policy.eviction_policy={order}", options
    )


def __getattr__(name: str) -> type:
    """Return the policy class of a name that vLLM looks up."""
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return cache_policy(name.removeprefix(PREFIX))

"""Eviction orders as cache policies of vLLM, which keeps KV chunks in CPU memory (`CachePolicyFactory`, vLLM 0.32.0).

With `cache_policy_module_path=spanlab.vllm_policy`, vLLM looks up `eviction_policy` here: `spanlab_sieve` is the order
`sieve` with its defaults. With options, or of one's own, a policy is a line in a module that vLLM can import:

    protected = cache_policy("slru", protected=0.5)

vLLM's chunks have one size and leave in any order, so the tree that an order sees has one level: each chunk is a leaf.
Only `cache_policy` needs vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from spanlab.checks import one_of
from spanlab.core.budget import Budget
from spanlab.core.eviction import EVICTION_ORDERS, FUTURE, REQUESTS, EvictionRules
from spanlab.core.store import Store
from spanlab.core.token_string import TokenString, string_of
from spanlab.core.tree import Node, PrefixTree

PREFIX = "spanlab_"
WIDTH = 4  # tokens of four bytes that name a chunk in the tree: a digest of its key


class Chunk(Protocol):
    """vLLM's record of a chunk: `ref_cnt` is its number of readers, -1 while it is written."""

    ref_cnt: int


class Request(Protocol):
    """vLLM's record of a request."""

    def get_offload_key_position(self, key: bytes) -> int | None:
        """Where a chunk ends in the prompt; None where that is not known."""
        ...


class ChunkPolicy:
    """vLLM's interface `CachePolicy` over an eviction order; a chunk that is written or read is locked.

    `order`    name of the order
    `options`  of the order, by name
    """

    order = "lru"
    options: Mapping[str, Any] = {}

    def __init__(self, cache_capacity: int) -> None:
        self.cache_capacity = cache_capacity
        self.clear()

    def clear(self) -> None:
        """Forget all chunks, and what the order has learned."""
        self._tree = PrefixTree(WIDTH)
        budget = Budget(kv_bytes=self.cache_capacity * WIDTH)
        self._store = Store(self._tree, 1, 0, budget, self.order, EvictionRules(self.options))
        self._root = self._tree.new_root()
        self._chunks: dict[bytes, Chunk] = {}
        self._leaves: dict[bytes, Node] = {}
        self._keys: dict[Node, bytes] = {}

    def get(self, key: bytes) -> Chunk | None:
        """The chunk of a key; None where it is not stored."""
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: Chunk) -> None:
        """Store a chunk, which is locked while it is not ready."""
        leaf = self._store.insert(self._root, _named(key), WIDTH, (), 0)
        self._chunks[key], self._leaves[key], self._keys[leaf] = chunk, leaf, key
        if chunk.ref_cnt:
            self._store.lock(leaf)

    def remove(self, key: bytes) -> None:
        """Take out a chunk that could not be written."""
        leaf = self._leaves[key]
        while leaf.locks:
            self._store.unlock(leaf)
        self._tree.remove(leaf)
        self._forget(leaf)

    def touch(self, keys: Iterable[bytes], req_context: Request) -> None:
        """Count a use of chunks in prefix order; the last one ages first."""
        for key in reversed(list(keys)):
            if key in self._leaves:
                self._store.touch(self._leaves[key], WIDTH)

    def on_store_miss(self, keys: Iterable[bytes], req_context: Request) -> None:
        """Orders recognise what comes back when it is inserted."""

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Request,
    ) -> None:
        """Count a use of what a request has read, and renew the age of what else it has seen."""
        for key in reversed(_in_prefix_order(key_groups, req_context)):
            leaf = self._leaves.get(key)
            if leaf is not None and key in reused_keys:
                self._store.touch(leaf, WIDTH)
            elif leaf is not None:
                self._store.refresh(leaf, 0)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Chunk]] | None:
        """Evict `n` idle chunks that are not protected; None, and no change, where there are fewer."""
        kept = [leaf for key in protected if (leaf := self._leaves.get(key)) is not None and not leaf.locks]
        idle = self._tree.num_leaves - self._store.kv_locked // WIDTH
        if idle - len(kept) < n:
            return None
        for leaf in kept:
            self._store.lock(leaf)
        gone = _Removed()
        self._tree.watchers.append(gone)
        self._store.evict(n * WIDTH, 0)
        self._tree.watchers.remove(gone)
        for leaf in kept:
            self._store.unlock(leaf)
        return [self._forget(leaf) for leaf in gone.leaves]

    def mark_evictable(self, key: bytes) -> None:
        """A chunk is neither read nor written any more."""
        self._store.unlock(self._leaves[key])

    def mark_non_evictable(self, key: bytes) -> None:
        """A chunk is read from now on."""
        self._store.lock(self._leaves[key])

    def _forget(self, leaf: Node) -> tuple[bytes, Chunk]:
        key = self._keys.pop(leaf)
        del self._leaves[key]
        return key, self._chunks.pop(key)


class _Removed:
    """Leaves in the order in which they left the tree."""

    def __init__(self) -> None:
        self.leaves: list[Node] = []

    def split(self, upper: Node, lower: Node) -> None:
        """A chunk is one block, which nothing cuts."""

    def removed(self, node: Node) -> None:
        self.leaves.append(node)


def cache_policy(order: str, **options: Any) -> type:
    """A class for vLLM's `CachePolicyFactory`; ValueError for an order that needs to know requests."""
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

    checked(order, options)
    content = {"__module__": __name__, "order": order, "options": options}
    return type(PREFIX + order, (ChunkPolicy, CachePolicy), content)


def checked(order: str, options: Mapping[str, Any]) -> None:
    """Refuse an order that vLLM cannot run, and options that it does not take."""
    unfit = {*EVICTION_ORDERS.needing(FUTURE), *EVICTION_ORDERS.needing(REQUESTS)}
    one_of("eviction_policy", order, [name for name in EVICTION_ORDERS if name not in unfit])
    EVICTION_ORDERS.check("cache_policy", order, {}, options, f"eviction_policy={order}")


def __getattr__(name: str) -> type:
    """The policy of a name that vLLM looks up."""
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return cache_policy(name.removeprefix(PREFIX))


def _named(key: bytes) -> TokenString:
    """What a chunk is called in the tree, now and when it comes back."""
    return string_of([np.frombuffer(blake2b(key, digest_size=4 * WIDTH).digest(), np.int32)])


def _in_prefix_order(key_groups: Sequence[Sequence[bytes]], request: Request) -> list[bytes]:
    """Keys of all groups of layers by where they end in the prompt, if that is known of each."""
    keys = [key for group in key_groups for key in group]
    ends = {key: end for key in keys if (end := request.get_offload_key_position(key)) is not None}
    return sorted(keys, key=ends.__getitem__) if len(ends) == len(keys) else keys

"""Each eviction order against its published algorithm, on entries of one block that share nothing."""

from __future__ import annotations

import numpy as np
import pytest

from spanlab.core.audit import recount
from spanlab.core.cache_spans import whole
from spanlab.core.eviction import EVICTION_ORDERS, FUTURE, EvictionRules, Future
from spanlab.core.prefix_index import shared_name
from spanlab.core.request import Request
from spanlab.core.store import Store
from spanlab.core.token_string import string_of
from spanlab.core.tree import PrefixTree

from .factories import KV, make_budget, make_request
from .published_evictions import Arc, Gdsf, S3Fifo, Sieve, Slru

BLOCK = 4


class Flat:
    """A store whose entries are blocks without common beginnings; a request finds its entry or stores it."""

    def __init__(self, capacity: int, eviction: str, rules: EvictionRules | None = None) -> None:
        tree = PrefixTree(BLOCK)
        self.store = Store(tree, KV, 0, make_budget(tokens=capacity * BLOCK), eviction, rules)
        self.root = tree.new_root(shared_name(prompt(0), whole(prompt(0))[0]))

    def ask(self, request: Request, now: int = 0) -> bool:
        tokens = string_of([request.tokens])
        self.store.note(now, request)
        self.store.on_admission(request)
        node, found = self.store.tree.match(self.root, tokens)
        if found:
            self.store.touch(node, found)
            return True
        assert self.store.reserve(BLOCK * KV, 0)
        self.store.unreserve(BLOCK * KV, 0)
        self.store.insert(self.root, tokens, BLOCK, (), 0)
        return False


def prompt(key: int, id: int = 0) -> Request:
    return make_request([key] * BLOCK, id=id)


def traffic(rng: np.random.Generator, keys: int, length: int) -> list[int]:
    """Popular keys, one-time scans and a working set that moves."""
    asked = []
    while len(asked) < length:
        kind = rng.random()
        if kind < 0.7:
            asked.append(int(rng.zipf(1.2)) % keys)
        elif kind < 0.75:
            asked += (int(rng.integers(keys)) + np.arange(rng.integers(2, 30))).tolist()
        else:
            asked.append(int(len(asked) // 50 + rng.integers(12)))
    return asked[:length]


@pytest.mark.parametrize("capacity", [1, 2, 7, 10, 40])
@pytest.mark.parametrize(
    ("eviction", "published"), [("slru", Slru), ("sieve", Sieve), ("s3_fifo", S3Fifo), ("arc", Arc), ("gdsf", Gdsf)]
)
def test_orders_equal_published_algorithms(eviction, published, capacity):
    rng = np.random.default_rng([capacity, len(eviction)])
    flat, reference = Flat(capacity, eviction), published(capacity)
    asked = traffic(rng, 90, 4_000)
    mine = [flat.ask(prompt(key)) for key in asked]
    assert mine == [reference.ask(key) for key in asked]
    assert 0 < sum(mine) < len(asked) or capacity == 1
    recount(flat.store, [flat.root])


BLIND = sorted(set(EVICTION_ORDERS) - set(EVICTION_ORDERS.needing(FUTURE)))


def hits(asked: list[int], capacity: int, eviction: str) -> int:
    """Requests that find their entry."""
    requests = [prompt(key, id=at) for at, key in enumerate(asked)]
    rules = EvictionRules(future=Future(requests, whole, shared_name, BLOCK) if eviction not in BLIND else None)
    flat = Flat(capacity, eviction, rules)
    return sum([flat.ask(request) for request in requests])


@pytest.mark.parametrize("seed", range(6))
def test_no_order_beats_belady(seed):
    rng = np.random.default_rng(seed)
    asked, capacity = traffic(rng, 60, 600), int(rng.integers(2, 30))
    best = hits(asked, capacity, "belady")
    found = {eviction: hits(asked, capacity, eviction) for eviction in BLIND}
    assert max(found.values()) <= best
    assert min(found.values()) < best


def test_two_choices_come_closer_to_lru():
    rng, capacity = np.random.default_rng(3), 20
    flat = {choices: Flat(capacity, "random", EvictionRules({"choices": choices})) for choices in (1, 2, 200)}
    lru, asked, equal = Flat(capacity, "lru"), traffic(rng, 90, 2_000), dict.fromkeys(flat, 0)
    for key in asked:
        found = lru.ask(prompt(key))
        for choices, one in flat.items():
            equal[choices] += one.ask(prompt(key)) == found
    assert equal[1] < equal[2] < equal[200] == len(asked)


def optimum(asked: list[int], capacity: int) -> int:
    """The most hits of any cache that stores every entry, by trying all evictions."""
    best = {frozenset(): 0}
    for key in asked:
        after: dict[frozenset, int] = {}
        for held, count in best.items():
            kept = [held] if key in held or len(held) < capacity else [held - {victim} for victim in held]
            for rest in kept:
                now = rest | {key}
                after[now] = max(after.get(now, 0), count + (key in held))
        best = after
    return max(best.values())


@pytest.mark.parametrize("seed", range(25))
def test_belady_is_optimal_on_tiny_traces(seed):
    rng = np.random.default_rng(seed)
    asked, capacity = rng.integers(0, 6, 14).tolist(), int(rng.integers(1, 5))
    assert hits(asked, capacity, "belady") == optimum(asked, capacity)


@pytest.mark.parametrize("seed", range(4))
def test_equal_sizes_make_belady_by_size_belady(seed):
    rng = np.random.default_rng(seed)
    asked, capacity = traffic(rng, 60, 300), int(rng.integers(2, 30))
    assert hits(asked, capacity, "belady_size") == hits(asked, capacity, "belady")

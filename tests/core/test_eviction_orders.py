"""Eviction orders against their published algorithms, on entries of one block without common prefixes."""

import numpy as np
import pytest

from spanlab.core.eviction import EVICTION_ORDERS, FUTURE, EvictionRules, Future
from spanlab.core.request import Request
from spanlab.core.store import Store, recount
from spanlab.core.token_string import string_of
from spanlab.core.tree import PrefixTree, shared_name, whole

from .factories import BLIND_EVICTIONS, KV, finish, make_budget, make_policy, make_request, walk
from .published_evictions import Arc, Gdsf, S3Fifo, Sieve, Slru

BLOCK = 4


class Flat:
    """A store of single blocks without common prefixes; a request reuses its entry or stores it."""

    def __init__(self, capacity: int, eviction: str, rules: EvictionRules | None = None) -> None:
        tree = PrefixTree(BLOCK)
        self.store = Store(tree, KV, 0, make_budget(tokens=capacity * BLOCK), eviction, rules)
        self.root = tree.new_root(shared_name(prompt(0), whole(prompt(0))[0]))

    def serve(self, request: Request, now: int = 0) -> bool:
        """Serve a request; return whether its entry was stored."""
        tokens = string_of([request.tokens])
        self.store.note(now, request)
        self.store.on_admission(request)
        node, matched = self.store.tree.match(self.root, tokens)
        if matched:
            self.store.touch(node, matched)
            return True
        assert self.store.reserve(BLOCK * KV, 0)
        self.store.unreserve(BLOCK * KV, 0)
        self.store.insert(self.root, tokens, BLOCK, (), 0)
        return False


def prompt(key: int, id: int = 0) -> Request:
    return make_request([key] * BLOCK, id=id)


def traffic(rng: np.random.Generator, keys: int, length: int) -> list[int]:
    """Return keys: popular ones, one-time scans and a working set that moves."""
    keys_used = []
    while len(keys_used) < length:
        kind = rng.random()
        if kind < 0.7:
            keys_used.append(int(rng.zipf(1.2)) % keys)
        elif kind < 0.75:
            keys_used += (int(rng.integers(keys)) + np.arange(rng.integers(2, 30))).tolist()
        else:
            keys_used.append(int(len(keys_used) // 50 + rng.integers(12)))
    return keys_used[:length]


@pytest.mark.parametrize("capacity", [1, 2, 7, 10, 40])
@pytest.mark.parametrize(
    ("eviction", "published"), [("slru", Slru), ("sieve", Sieve), ("s3_fifo", S3Fifo), ("arc", Arc), ("gdsf", Gdsf)]
)
def test_orders_equal_published_algorithms(eviction, published, capacity):
    rng = np.random.default_rng([capacity, len(eviction)])
    flat, reference = Flat(capacity, eviction), published(capacity)
    keys = traffic(rng, 90, 4_000)
    matches = [flat.serve(prompt(key)) for key in keys]
    assert matches == [reference.serve(key) for key in keys]
    assert 0 < sum(matches) < len(keys) or capacity == 1
    recount(flat.store, [flat.root])


BLIND = sorted(set(EVICTION_ORDERS) - set(EVICTION_ORDERS.needing(FUTURE)))


def count_hits(keys: list[int], capacity: int, eviction: str) -> int:
    """Return the number of requests whose entry is stored."""
    requests = [prompt(key, id=index) for index, key in enumerate(keys)]
    rules = EvictionRules(future=Future(requests, whole, shared_name, BLOCK) if eviction not in BLIND else None)
    flat = Flat(capacity, eviction, rules)
    return sum([flat.serve(request) for request in requests])


@pytest.mark.parametrize("seed", range(6))
def test_no_order_beats_belady(seed):
    rng = np.random.default_rng(seed)
    keys, capacity = traffic(rng, 60, 600), int(rng.integers(2, 30))
    best = count_hits(keys, capacity, "belady")
    hits = {eviction: count_hits(keys, capacity, eviction) for eviction in BLIND}
    assert max(hits.values()) <= best
    assert min(hits.values()) < best


def test_two_choices_come_closer_to_lru():
    rng, capacity = np.random.default_rng(3), 20
    flat = {choices: Flat(capacity, "random", EvictionRules({"choices": choices})) for choices in (1, 2, 200)}
    lru, keys, equal = Flat(capacity, "lru"), traffic(rng, 90, 2_000), dict.fromkeys(flat, 0)
    for key in keys:
        expected = lru.serve(prompt(key))
        for choices, store in flat.items():
            equal[choices] += store.serve(prompt(key)) == expected
    assert equal[1] < equal[2] < equal[200] == len(keys)


def optimum(keys: list[int], capacity: int) -> int:
    """Return the maximum hits of any cache that stores every entry, by trying all evictions."""
    best = {frozenset(): 0}
    for key in keys:
        after: dict[frozenset, int] = {}
        for resident, count in best.items():
            fits = key in resident or len(resident) < capacity
            for remaining in [resident] if fits else [resident - {victim} for victim in resident]:
                now = remaining | {key}
                after[now] = max(after.get(now, 0), count + (key in resident))
        best = after
    return max(best.values())


@pytest.mark.parametrize("seed", range(25))
def test_belady_is_optimal_on_tiny_traces(seed):
    rng = np.random.default_rng(seed)
    keys, capacity = rng.integers(0, 6, 14).tolist(), int(rng.integers(1, 5))
    assert count_hits(keys, capacity, "belady") == optimum(keys, capacity)


@pytest.mark.parametrize("seed", range(4))
def test_equal_sizes_make_belady_by_size_belady(seed):
    rng = np.random.default_rng(seed)
    keys, capacity = traffic(rng, 60, 300), int(rng.integers(2, 30))
    assert count_hits(keys, capacity, "belady_size") == count_hits(keys, capacity, "belady")


# -- Evicting bytes at once or step by step takes the same entries, so steps can be jumped. ---


TOKENS = 96


def full_policy(eviction: str, fixed_blocks: bool, seed: int):
    """Return a policy whose store is full of prompts with common prefixes."""
    rng = np.random.default_rng(seed)
    policy = make_policy(make_budget(tokens=TOKENS), eviction=eviction, block_size=4, fixed_blocks=fixed_blocks)
    earlier = [()]
    for number in range(30):
        base = earlier[rng.integers(len(earlier))][: 4 * rng.integers(6)]
        earlier.append((*base, *rng.integers(0, 9, rng.integers(1, 21)).tolist()))
        allocation = policy.allocate(policy.match(make_request(earlier[-1], id=number), number), number)
        assert allocation is not None
        finish(policy, allocation, number)
    return policy


def stored(policy) -> list[tuple[int, ...]]:
    """Return the paths of all nodes."""
    return sorted(tuple(path) for root in policy.index.all() for path, _ in walk(root))


@pytest.mark.parametrize("fixed_blocks", [False, True])
@pytest.mark.parametrize("eviction", BLIND_EVICTIONS)
def test_the_same_entries_are_evicted_at_once_and_token_by_token(eviction, fixed_blocks):
    for seed in range(3):
        at_once, stepwise = (full_policy(eviction, fixed_blocks, seed) for _ in range(2))
        for tokens in (1, 7, 30, 40):
            assert at_once.store.reserve(tokens, 0)
            assert all(stepwise.store.reserve(1, 0) for _ in range(tokens))
            assert stored(at_once) == stored(stepwise)

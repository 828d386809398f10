"""Offline bounds against exhaustive search, closed forms and hand-made traces."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.request import Budget, Request, Span
from spanlab.core.rules import StorageRules
from spanlab.core.tree import isolated, whole
from spanlab.offline.bound import (
    DESCENT,
    INFINITE,
    PROGRAM,
    UNITS,
    CacheMemory,
    Packing,
    Resource,
    best_prices,
    in_tokens,
    offline_bound,
    priced_tokens,
    resources_of,
)
from spanlab.offline.forest import (
    Admissions,
    Reuses,
    ServiceOrder,
    any_position_rules,
    build_forest,
    find_reuses,
    prefix_rules,
    salted_parent,
    service_order,
)

from .brute_force import Exhaustive

KV = 2
EXAMPLES = settings(max_examples=80, deadline=None, derandomize=True)


def prompt(number: int, *spans: list[int] | tuple[int, ...], independent: bool = False) -> Request:
    arrays = [np.array(tokens, np.int32) for tokens in spans]
    return Request(number, 0, tuple(Span(tokens, independent) for tokens in arrays))


def in_turn(requests, rules: StorageRules) -> Reuses:
    order = np.arange(len(requests))
    counted = np.ones(len(requests), np.bool_)
    return find_reuses(build_forest(requests, rules), ServiceOrder(order, order, order, counted))


def prefixes(unit: int = 1, last_token: bool = False) -> StorageRules:
    return StorageRules(whole, salted_parent, unit, last_token)


@st.composite
def tiny_prompts(draw, count: int, units: int, unit: int) -> list[Request]:
    """Prompts of a few units over two letters, so that many share prefixes, each with a unique last token."""
    letters = st.lists(st.integers(0, 1), min_size=1, max_size=units)
    requests = []
    for number in range(draw(st.integers(2, count))):
        tokens = np.repeat(draw(letters), unit)
        requests.append(prompt(number, [*tokens, 100 + number]))
    return requests


def longest(requests) -> int:
    return max(request.num_tokens for request in requests)


@EXAMPLES
@given(st.data())
def test_unit_blocks_are_bounded_exactly(data):
    unit = data.draw(st.sampled_from([1, 2]))
    requests = data.draw(tiny_prompts(6, 3, unit))
    rules = prefixes(unit, data.draw(st.booleans()))
    room = longest(requests) + data.draw(st.integers(0, 5))
    memory = CacheMemory(Budget(total_bytes=KV * room), KV)
    bound = offline_bound(in_turn(requests, rules), memory).tokens
    assert bound == Exhaustive(tuple(requests), rules, memory).most_reused()


@EXAMPLES
@given(st.data())
def test_spans_anywhere_are_bounded_exactly(data):
    documents = [[1, 2], [3], [4]]
    requests = []
    for number in range(data.draw(st.integers(2, 5))):
        chosen = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=2))
        spans = [Span(np.array(documents[which], np.int32), independent=True) for which in chosen]
        question = Span(np.array([100 + number], np.int32))
        requests.append(Request(number, 0, (*spans, question)))
    rules = StorageRules(isolated, salted_parent)
    room = longest(requests) + data.draw(st.integers(0, 3))
    memory = CacheMemory(Budget(kv_bytes=KV * room), KV)
    bound = offline_bound(in_turn(requests, rules), memory).tokens
    assert bound == Exhaustive(tuple(requests), rules, memory).most_reused()


@EXAMPLES
@given(st.data())
def test_no_schedule_of_states_beats_the_bound(data):
    requests = data.draw(tiny_prompts(5, 3, 1))
    rules, state = prefixes(), data.draw(st.sampled_from([1, 3, 6]))
    kv = KV * (longest(requests) + data.draw(st.integers(0, 3)))
    states = state * data.draw(st.integers(1, 3))
    kinds = (Budget(total_bytes=kv + states), Budget(kv_bytes=kv, state_bytes=states))
    memory = CacheMemory(data.draw(st.sampled_from(kinds)), KV, state)
    reuses = in_turn(requests, rules)
    bound = offline_bound(reuses, memory).tokens
    best = Exhaustive(tuple(requests), rules, memory).most_reused()
    assert best <= bound <= reuses.infinite_tokens


@EXAMPLES
@given(st.data())
def test_no_schedule_of_entries_beats_the_bound(data):
    requests = data.draw(tiny_prompts(5, 2, 1))
    rules = prefixes()
    budget = Budget(entries=data.draw(st.integers(2, 3)))
    memory = CacheMemory(budget, KV)
    reuses = in_turn(requests, rules)
    best = Exhaustive(tuple(requests), rules, memory).most_reused()
    assert best <= offline_bound(reuses, memory).tokens <= reuses.infinite_tokens


def documents_in_turn(documents: int, rounds: int, length: int = 8) -> list[Request]:
    """Return prompts with each document once per round, followed by a new token."""
    requests = []
    for number in range(documents * rounds):
        document = [1_000 * (number % documents + 1)] * length
        requests.append(prompt(number, [*document, number]))
    return requests


def test_priced_bound_of_equal_documents_is_tight():
    requests = documents_in_turn(4, 60)
    reuses = in_turn(requests, prefixes())
    # the memory fits the running prompt (9 tokens and a state) and one of the three other documents
    total = KV * (9 + 8) + 2 * 10
    bound = offline_bound(reuses, CacheMemory(Budget(total_bytes=total), KV, 10)).tokens
    best = 8 * len(requests) / 3  # memory of one document, occupied for three slots by each reuse
    assert 0.95 * best < bound <= 1.05 * best


def test_priced_bound_meets_the_exact_one_without_states():
    requests = documents_in_turn(5, 40)
    reuses = in_turn(requests, prefixes())
    room = 9 + 2 * 8 + 3
    exact = offline_bound(reuses, CacheMemory(Budget(total_bytes=KV * room), KV)).tokens
    capacity = KV * (room - reuses.prompt_tokens)
    priced, _ = priced_tokens(reuses, [Resource(capacity, KV)])
    assert exact <= priced <= 1.02 * exact


def crowded_documents(seed: int) -> Reuses:
    """Return reuses of random documents in random order, most of them longer than the free memory."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 40, 12)
    documents = rng.integers(0, 12, 150)
    return in_turn([prompt(n, [1_000 * (d + 1)] * lengths[d], [n]) for n, d in enumerate(documents)], prefixes())


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("budget", [Budget(total_bytes=KV * 150), Budget(kv_bytes=KV * 150, state_bytes=60)])
def test_the_linear_program_finds_the_best_prices(seed, budget):
    """Neither the prices of the descent nor any nearby prices are better."""
    reuses, rng = crowded_documents(seed), np.random.default_rng(seed)
    resources = resources_of(reuses, CacheMemory(budget, KV, 20))
    packing = Packing(reuses, resources, in_tokens(reuses))
    prices = best_prices(packing)
    best = packing.choose(prices).value
    tokens, method = priced_tokens(reuses, resources)
    by_descent, other = priced_tokens(reuses, resources, limit=0)
    assert (method, other) == (PROGRAM, DESCENT)
    assert tokens == int(best + 1e-6) <= by_descent <= 1.05 * tokens
    for _ in range(20):
        moved = np.maximum(prices * rng.uniform(0.9, 1.1, prices.shape), 0.0)
        assert packing.choose(moved).value >= best * (1 - 1e-9)


def test_a_bound_says_how_it_was_found():
    reuses = crowded_documents(0)
    memories = {
        UNITS: CacheMemory(Budget(total_bytes=KV * 150), KV),
        PROGRAM: CacheMemory(Budget(total_bytes=KV * 150), KV, 20),
        INFINITE: CacheMemory(Budget(total_bytes=KV * 10_000), KV, 20),
    }
    assert {offline_bound(reuses, memory).method: memory for memory in memories.values()} == memories
    assert offline_bound(reuses, memories[PROGRAM], limit=100).method == DESCENT


def test_cyclic_scan_keeps_what_fits():
    """In a scan of five documents with memory for three, LRU reuses nothing, the optimum half."""
    requests = documents_in_turn(5, 41)
    reuses = in_turn(requests, prefixes())
    memory = CacheMemory(Budget(total_bytes=KV * (9 + 2 * 8)), KV)
    # two others stay beside the running one; a reuse occupies four slots: half of all of them
    assert offline_bound(reuses, memory).tokens == pytest.approx(8 * 200 / 2, abs=16)


def test_bound_grows_with_memory_up_to_the_infinite_cache():
    requests = documents_in_turn(6, 20)
    reuses = in_turn(requests, prefixes())
    sizes = [KV * room for room in range(9, 70, 4)]
    for state in (0, 12):
        budgets = [Budget(total_bytes=size + 6 * state) for size in sizes]
        bounds = [offline_bound(reuses, CacheMemory(b, KV, state)).tokens for b in budgets]
        assert all(low <= high + 8 for low, high in pairwise(bounds))
        assert bounds[-1] == reuses.infinite_tokens == 8 * 19 * 6


def test_units_and_the_last_token_cut_what_is_reused():
    requests = [prompt(0, range(10)), prompt(1, range(10)), prompt(2, range(7))]
    reused = {
        (unit, last): in_turn(requests, prefixes(unit, last)).infinite_tokens
        for unit in (1, 4, 5)
        for last in (False, True)
    }
    assert reused == {
        (1, False): 9 + 6,
        (1, True): 10 + 7,
        (4, False): 8 + 4,
        (4, True): 8 + 4,
        (5, False): 5 + 5,
        (5, True): 10 + 5,
    }


def test_salts_share_nothing():
    first = prompt(0, [1, 2, 3])
    other = replace(first, id=1, cache_salt="b")
    assert in_turn([first, other], prefixes()).infinite_tokens == 0
    assert in_turn([first, replace(first, id=2)], prefixes()).infinite_tokens == 2


def test_spans_are_found_wherever_they_stand():
    a, b = Span(np.arange(5, dtype=np.int32), True), Span(np.arange(50, 57, dtype=np.int32), True)
    tail = Span(np.array([99], np.int32))
    requests = [Request(0, 0, (a, b, tail)), Request(1, 0, (b, a, tail))]
    assert in_turn(requests, prefix_rules(False)).infinite_tokens == 0
    assert in_turn(requests, any_position_rules(False)).infinite_tokens == 12


def test_warm_up_fills_the_cache_and_counts_nothing():
    requests = documents_in_turn(1, 4)
    order = np.arange(4)
    counted = order >= 2
    reuses = find_reuses(build_forest(requests, prefixes()), ServiceOrder(order, order, order, counted))
    assert reuses.infinite_tokens == 2 * 8


def test_preempted_request_may_store_until_it_ends():
    """Between its admission and its end it may have recomputed its prompt."""
    requests = [*documents_in_turn(3, 1), *documents_in_turn(1, 1)]
    admitted = np.array([0.0, 1.0, 2.0, 3.0])
    finished = np.array([2.5, 1.5, 2.6, 4.0])
    memory = CacheMemory(Budget(total_bytes=KV * 9), KV)
    bounds = []
    for preempted in (False, True):
        flags = np.array([preempted, False, False, False])
        run = Admissions(np.arange(4), admitted, finished, flags, np.ones(4, np.bool_))
        order = service_order(run)
        assert order.stored_until.tolist() == [2 if preempted else 0, 1, 2, 3]
        reuses = find_reuses(build_forest(requests, prefixes()), order)
        bounds.append(offline_bound(reuses, memory).tokens)
    assert bounds == [0, 8]

"""Caches of whole sequences: rules case by case, and random operations with a recount after each."""

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.policies.sequences import SequenceMemory, SequencePolicy
from spanlab.core.policies.slots import Sequence, SlotPolicy, SlotRules, best_of, shifted
from spanlab.core.protocol import SharedPolicy
from spanlab.core.token_string import string_of

from .clients import Client
from .steps import serve_waves
from .test_block_policy import request, reused

A, B, C, D = (range(first, first + 20) for first in (100, 200, 300, 400))


def sequences(tokens=1000, entries=16):
    return SequencePolicy(SequenceMemory(tokens, 1), entries)


def slots(tokens=1000, **rules):
    return SlotPolicy(SlotRules(**rules), SequenceMemory(tokens, 1))


def one_by_one(policy, *prompts, output=1):
    """Tokens that each prompt reuses, served one after another; `output` tokens each, which no prompt contains."""
    served = serve_waves(policy, [[request(id, prompt, output)] for id, prompt in enumerate(prompts)])
    return list(reused(served).values())


# -- whole sequences ---------------------------------------------------------------------------------------------------


def test_a_prompt_copies_the_longest_common_beginning():
    assert one_by_one(sequences(), A, [*A, *B], [*A, *B[:5], *C], [*A[:7], *D]) == [0, 20, 25, 7]


def test_a_prompt_that_is_stored_whole_reuses_nothing():
    assert one_by_one(sequences(), A, A, A[:10], [*A[:10], *B]) == [0, 0, 0, 10]
    policy = sequences()
    one_by_one(policy, A)
    plan = policy.match(request(9, A), 0)
    assert (plan.matched, plan.resume, plan.losses.alignment, plan.losses.last_token) == (20, 0, 19, 1)


def test_all_output_tokens_but_the_last_are_reused():
    answer = [7, 8, 9]
    waves = [[request(0, A, 3, output_ids=answer)], [request(1, [*A, *answer, *B])]]
    assert reused(serve_waves(sequences(), waves))[1] == 22


def test_the_sequence_stored_first_leaves_first_even_if_it_was_read():
    policy = sequences(entries=2)
    assert one_by_one(policy, A, B, [*A, 1], C, [*A, 2], [*B, 2]) == [0, 0, 20, 0, 20, 0]
    # [*A, 1] pushed A out and was itself stored, so A's beginning stays found; B left when C came
    assert policy.store.evicted_bytes == 20 + 20 + 21 + 20


def test_a_sequence_that_is_computed_again_keeps_its_age():
    policy = sequences(entries=2)
    waves = [[request(id, prompt, output_ids=[5])] for id, prompt in enumerate([A, B, A, C])]
    serve_waves(policy, waves)
    assert [len(tokens) for _, tokens in policy.stored] == [21, 21]
    assert policy.match(request(9, [*A, 1]), 0).resume == 0
    assert policy.match(request(9, [*B, 1]), 0).resume == 20


def test_sequences_leave_where_the_budget_is_short():
    policy = sequences(tokens=50)
    assert one_by_one(policy, A, B, C, [*B, 1], [*A, 1]) == [0, 0, 0, 20, 0]


# -- slots -------------------------------------------------------------------------------------------------------------


def test_one_slot_knows_its_last_request_alone():
    policy = slots(slots=1)
    assert one_by_one(policy, A, [*A, *B], A, [*A, *C], B, [*A, *C]) == [0, 20, 19, 20, 0, 0]


def test_the_slot_used_least_recently_takes_a_prompt_that_no_slot_resembles():
    policy = slots(slots=2, unified=False)
    assert one_by_one(policy, A, B, [*A, 1], C, [*A, 2], [*B, 2]) == [0, 0, 20, 0, 20, 0]


def test_a_slot_that_resembles_a_prompt_too_little_is_not_preferred():
    policy = slots(slots=2, unified=False, similarity=0.5)
    assert one_by_one(policy, [*A, *B], C, [*A, *D]) == [0, 0, 20]  # by age: the oldest slot is that of A
    policy = slots(slots=2, unified=False, similarity=0.5)
    assert one_by_one(policy, C, [*A, *B], [*A, *D]) == [0, 0, 0]  # A has half of the prompt, not more
    policy = slots(slots=2, unified=False, similarity=0.4)
    assert one_by_one(policy, C, [*A, *B], [*A, *D]) == [0, 0, 20]


def test_a_busy_slot_is_not_read():
    policy = slots(slots=2, unified=False)
    waves = [[request(0, A, 9)], [request(1, [*A, 1], 9), request(2, [*A, 2], 9), request(3, [*A, 3], 9)]]
    served = serve_waves(policy, waves)
    assert reused(served) == {0: 0, 1: 20, 2: 0, 3: 20}
    assert served[2].first_plan.losses.alignment == 20, "A is stored, in another request's slot"


def test_idle_slots_move_to_host_memory_and_come_back():
    policy = slots(host=1000)
    assert one_by_one(policy, A, B, C, [*A, 1], [*B, 1], [*C, 1]) == [0, 0, 0, 20, 20, 20]
    assert policy.store.cached <= 21, "unified slots are cleared"
    policy = slots(host=45)
    assert one_by_one(policy, A, B, C, D, [*B, 1], [*A, 1]) == [0, 0, 0, 0, 20, 0]


def test_a_host_sequence_that_a_prompt_hardly_uses_stays_there():
    long = [*A, *B, *C, *D, *range(500, 520)]  # of which [*A, 1] would use a fifth
    assert one_by_one(slots(host=1000), long, range(5), [*A, 1]) == [0, 0, 0]
    assert one_by_one(slots(host=1000), long[:80], range(5), [*A, 1]) == [0, 0, 20]


def test_chunks_move_to_other_positions():
    policy = slots(slots=1, chunk=10)
    assert one_by_one(policy, [*A, *B, *C], [*A, *C], [*A, *C[:15], *B]) == [0, 39, 35]
    assert one_by_one(slots(slots=1, chunk=21), [*A, *B, *C], [*A, *C]) == [0, 20]
    assert one_by_one(slots(slots=1, chunk=10), [*A, *B], [*C, *A]) == [0, 0], "a chunk follows what is reused"
    assert one_by_one(slots(slots=1, chunk=10), [*A, *B], [*B, *A]) == [0, 20], "chunks keep their order"


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.integers(1, 5),
    st.integers(0, 4),
)
def test_chunks_equal_a_search_token_by_token(cached, wanted, chunk, start):
    source = end = start = min(start, len(cached), len(wanted))
    while source < len(cached) and end < len(wanted):
        length = 0
        while source + length < len(cached) and end + length < len(wanted):
            if cached[source + length] != wanted[end + length]:
                break
            length += 1
        if length >= chunk:
            source, end = source + length, end + length
        else:
            source += 1
    arrays = np.array(cached, np.int32), np.array(wanted, np.int32)
    assert shifted(*arrays, start, chunk) == end


def test_the_best_host_sequence_has_more_and_wastes_less():
    def of(*runs):
        return Sequence("", string_of([np.array(run, np.int32) for run in runs]))

    wanted, current = of(A, B, C), of(A)
    longer, exact, wasteful = of(A, B, C, D), of(A, B, C), of(A, range(1000, 1100))
    assert best_of([longer], current, wanted) is None, "the slot's own sequence is used whole, the other is not"
    assert best_of([longer], of(A, D), wanted) is longer
    assert best_of([longer, exact], of(A, D), wanted) is longer, "the second has no more of the prompt"
    assert best_of([exact, longer], of(A, D), wanted) is exact
    assert best_of([wasteful], of(), wanted) is None


def test_unified_slots_are_cleared_one_by_one_where_memory_is_short():
    policy = slots(tokens=70)
    served = one_by_one(policy, A, B, C, [*D, *range(15)], [*C, 1])
    assert served == [0, 0, 0, 0, 0]  # slots 3, 2, 1 hold A, B, C; slots are cleared from the first one on: C, then B
    policy = slots(tokens=70)
    assert one_by_one(policy, A, B, C, [*D, *range(15)], [*A, 1]) == [0, 0, 0, 0, 20]


# -- any operations ----------------------------------------------------------------------------------------------------

POLICIES = {
    "sequences": lambda: sequences(tokens=400, entries=5),
    "many sequences": lambda: sequences(tokens=300, entries=1000),
    "unified": lambda: slots(tokens=300),
    "unified, host": lambda: slots(tokens=300, host=200),
    "parts": lambda: slots(tokens=300, unified=False),
    "parts, host": lambda: slots(tokens=300, slots=3, unified=False, host=200),
    "chunks": lambda: slots(tokens=300, slots=5, host=100, chunk=4),
    "busy to host only": lambda: slots(tokens=300, host=200, idle_to_host=False),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("in_flight", [1, 6])
def test_counts_hold_after_every_operation(name, in_flight):
    policy = POLICIES[name]()
    client = Client(SharedPolicy(policy), in_flight, in_flight, count(), count())
    for _ in range(600):
        client.act()
        policy.check()
    client.end()
    policy.check()
    assert policy.store.running == 0
    assert policy.store.evicted_bytes > 0


def in_memory(policy):
    """Tokens of every stored sequence, and of every running request beyond them, from the sequences themselves."""
    if isinstance(policy, SequencePolicy):
        stored = {key: len(key[1]) - 1 for key in policy.stored}  # of the last output token, there is no KV
        return stored, sum([allocation.tokens for allocation in policy._allocations])
    stored = {slot.number: len(slot.sequence) for slot in policy.slots}
    running = [slot.allocation.tokens - len(slot.sequence) for slot in policy.slots if slot.allocation is not None]
    return stored, sum(running)


@pytest.mark.parametrize("name", POLICIES)
@given(seed=st.integers(0, 1 << 16), in_flight=st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_bytes_are_counted_once_and_freed_exactly(name, seed, in_flight):
    """Bytes come and leave by what is stored before and after each operation; a token has seven."""
    policy, size = POLICIES[name](), 7
    store = policy.store
    store.token_bytes = size
    client = Client(SharedPolicy(policy), seed, in_flight, count(), count())
    stored: dict = {}
    for _ in range(80):
        inserted, evicted = store.inserted_bytes, store.evicted_bytes
        client.act()
        (now, running), before = in_memory(policy), stored
        came, left = store.inserted_bytes - inserted, store.evicted_bytes - evicted
        assert store.kv_cached == size * sum(now.values())
        assert store.running == running
        assert store.cached + store.running + store.free == store.tokens
        assert came - left == size * (sum(now.values()) - sum(before.values()))
        if isinstance(policy, SequencePolicy):
            entered = sum(tokens for key, tokens in now.items() if key not in before)
            gone = sum(tokens for key, tokens in before.items() if key not in now)
            assert (came, left) == (size * entered, size * gone)
        else:
            grown = sum(max(0, tokens - before.get(number, 0)) for number, tokens in now.items())
            assert came >= size * grown and left >= 0
        stored = now
    client.end()
    assert (store.running, store.state_cached) == (0, 0)
    assert store.inserted_bytes - store.evicted_bytes == size * sum(in_memory(policy)[0].values())


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_tokens_reused_and_lost_sum_to_the_prompt(name, data):
    source = data.draw(st.lists(st.integers(0, 1), min_size=12, max_size=24))
    prompts = data.draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12), st.integers(1, 5)), min_size=1))
    waves = [[request(id, source[first : first + n], out)] for id, (first, n, out) in enumerate(prompts)]
    waves = [[*first, *second] for first, second in zip(waves[::2], [*waves[1::2], []], strict=False)]
    for sequence in serve_waves(POLICIES[name](), waves).values():
        plan = sequence.first_plan
        assert plan.resume + sum(plan.losses) == plan.prompt
        assert min(plan.losses) >= 0
        assert plan.resume <= plan.matched <= plan.seen <= plan.prompt
        assert plan.resume < plan.prompt


@pytest.mark.parametrize("name", POLICIES)
def test_a_match_changes_nothing(name):
    policy = POLICIES[name]()
    one_by_one(policy, A, B, [*A, *C], D)
    before = policy.store.cached, policy.store.evicted_bytes, policy.store.inserted_bytes
    plans = [policy.match(request(9, [*A, *B]), 0) for _ in range(2)]
    assert plans[0].resume == plans[1].resume
    assert before == (policy.store.cached, policy.store.evicted_bytes, policy.store.inserted_bytes)
    policy.check()

"""Who leaves, in which order, and who may not."""

import copy

import numpy as np
import pytest

from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request, Span
from spanlab.core.store import Store, recount
from spanlab.core.token_string import string_of
from spanlab.core.tree import Node

from .factories import KV, STATE, begin, make_budget, make_policy, make_request, make_store, serve, states_in, walk


def put(store: Store, root: Node, tokens, states=()) -> Node:
    """Store a sequence as a policy does: reserve, give back, insert."""
    encoded = string_of([np.array(tokens, np.int32)])
    missing = len(tokens) - store.tree.match(root, encoded)[1]
    assert store.reserve(missing * KV, len(states) * STATE)
    assert store.reserve_entry(root, encoded, len(tokens))
    store.unreserve(missing * KV, len(states) * STATE)
    node = store.insert(root, encoded, len(tokens), states, STATE)
    recount(store, [root])
    return node


def sequences(root: Node) -> list[tuple[int, ...]]:
    """The leaves' token strings, sorted."""
    return sorted(path for path, node in walk(root) if not node.children)


def states(root: Node) -> list[tuple[int, ...]]:
    return sorted(path for path, _ in states_in(root))


A, B, C, D = (1, 1), (2, 2), (3, 3), (4, 4)


def three(eviction: str):
    """Room for three sequences, filled with A, B, C; A is then used twice and C once."""
    store = make_store(make_budget(tokens=6), eviction=eviction)
    root = store.tree.new_root()
    a, _, c = (put(store, root, tokens) for now, tokens in enumerate((A, B, C)))
    for node in (a, a, c):
        store.touch(node, node.depth)
    return store, root


@pytest.mark.parametrize(("eviction", "order"), [("fifo", [A, B, C]), ("lru", [B, A, C]), ("lfu", [B, C, A])])
def test_each_order_evicts_as_named(eviction, order):
    store, root = three(eviction)
    gone = []
    for size in (1, 2, 3):
        assert store.reserve(2 * KV, 0)
        gone = [tokens for tokens in (A, B, C) if tokens not in sequences(root)]
        assert set(gone) == set(order[:size])
    assert not store.reserve(KV, 0)


@pytest.mark.parametrize(("eviction", "victim"), [("fifo", (1,)), ("lru", (2,)), ("lfu", (2,))])
def test_states_leave_by_their_own_use(eviction, victim):
    store = make_store(make_budget(states=2), eviction=eviction)
    root = store.tree.new_root()
    put(store, root, (1, 9), states=(1,))
    put(store, root, (2, 9), states=(1,))
    store.touch_state(dict(states_in(root))[1,])
    assert store.reserve(0, STATE)
    assert states(root) == [state for state in [(1,), (2,)] if state != victim]
    # its KV stays
    assert sequences(root) == [(1, 9), (2, 9)]
    recount(store, [root])


def test_leaves_are_evicted_before_their_parents():
    store = make_store(make_budget(tokens=5), eviction="fifo")
    root = store.tree.new_root()
    put(store, root, (1, 2))
    put(store, root, (1, 2, 3))
    put(store, root, (9, 9))
    evicted = []
    for _ in range(3):
        assert store.reserve(KV, 0)
        evicted.append(sequences(root))
    # the oldest node (1, 2) has a child; the child leaves first, then the node itself at once with the next need
    assert evicted == [[(1, 2), (9, 9)], [(9, 9)], [(9, 9)]]


def test_the_common_budget_evicts_the_lowest_rank_of_both():
    store = make_store(make_budget(total=4 * KV + 2 * STATE))
    root = store.tree.new_root()
    put(store, root, (1, 9), states=(1,))
    put(store, root, (2, 9), states=(1,))
    store.touch(dict(walk(root))[1, 9], 2)  # its KV is in use, its state is not
    store.touch_state(dict(states_in(root))[2,])  # and the other way round
    assert store.reserve(0, STATE)
    assert (states(root), sequences(root)) == ([(2,)], [(1, 9), (2, 9)])
    assert store.reserve(KV, 0)  # the second leaf leaves, with the state in it
    assert (states(root), sequences(root)) == ([], [(1, 9)])
    recount(store, [root])


def test_kv_over_its_own_budget_spares_states_that_stand_elsewhere():
    store = make_store(make_budget(tokens=4, states=5))
    root = store.tree.new_root()
    put(store, root, (2, 9), states=(1, 2))
    put(store, root, (1, 9), states=(1,))
    assert store.reserve(KV, 0)
    assert (states(root), sequences(root)) == ([(1,)], [(1, 9)])


def test_states_leave_alone_and_their_positions_are_remembered():
    store = make_store(make_budget(states=3), eviction="fifo")
    root = store.tree.new_root()
    node = put(store, root, (1, 1, 1, 1), states=(2, 4))
    put(store, root, (5, 5), states=(2,))
    assert store.reserve(0, 2 * STATE)
    assert (states(root), node.lost) == ([(5, 5)], [2, 4])
    assert sequences(root) == [(1, 1, 1, 1), (5, 5)]
    store.unreserve(0, 2 * STATE)
    put(store, root, (1, 1, 1, 1), states=(4,))
    assert (states(root), node.lost) == ([(1, 1, 1, 1), (5, 5)], [2])
    recount(store, [root])


def test_a_state_can_be_stored_between_two_states():
    store = make_store()
    root = store.tree.new_root()
    node = put(store, root, (1, 2, 3, 4, 5), states=(1, 5))
    assert put(store, root, (1, 2, 3, 4, 5), states=(2, 3, 5)) is node
    assert [(state.position, state.created) for state in node.states] == [(1, 1), (2, 2), (3, 2), (5, 1)]
    assert store.state_cached == 4 * STATE


def test_inserted_states_are_in_the_nodes_of_their_positions():
    store = make_store()
    root = store.tree.new_root()
    put(store, root, (1, 2, 3))
    put(store, root, (1, 2, 9))
    put(store, root, (1, 2, 3, 4), states=(1, 2, 3, 4))
    assert states(root) == [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]
    assert [(node.depth, [state.position for state in node.states]) for _, node in walk(root) if node.states] == [
        (2, [1, 2]),
        (3, [3]),
        (4, [4]),
    ]
    recount(store, [root])


def test_what_is_locked_stays_and_so_do_its_ancestors():
    store = make_store(make_budget(tokens=6))
    root = store.tree.new_root()
    deep = put(store, root, (1, 2))
    deep = put(store, root, (1, 2, 3))
    put(store, root, (9, 9, 9))
    store.lock(deep)
    assert store.spare_tokens() == 3
    assert not store.reserve(4 * KV, 0)
    assert store.reserve(3 * KV, 0)
    assert sequences(root) == [(1, 2, 3)]
    store.unreserve(3 * KV, 0)
    store.unlock(deep)
    assert store.spare_tokens() == 6


def test_unlocked_states_on_locked_paths_are_evicted():
    store = make_store(make_budget(states=2))
    root = store.tree.new_root()
    node = put(store, root, (1, 2, 3), states=(1, 2))
    store.lock(node)
    store.lock_state(dict(states_in(root))[1, 2])
    assert store.spare_state_bytes() == STATE
    assert not store.reserve(0, 2 * STATE)
    assert store.reserve(0, STATE)
    assert (states(root), sequences(root)) == ([(1, 2)], [(1, 2, 3)])


def test_a_split_inside_a_locked_edge_keeps_both_parts_locked():
    store = make_store(make_budget(tokens=5))
    root = store.tree.new_root()
    node = put(store, root, (1, 2, 3, 4))
    store.lock(node)
    put(store, root, (1, 2, 9))
    assert store.kv_locked == 4 * KV
    assert not store.reserve(2 * KV, 0)
    store.unlock(node)
    assert store.kv_locked == 0


@pytest.mark.parametrize(
    ("kv", "state", "fits"), [(10, 0, True), (11, 0, False), (0, 2, True), (0, 3, False), (3, 2, True), (4, 2, False)]
)
def test_fits_asks_every_budget(kv, state, fits):
    store = make_store(make_budget(tokens=10, states=2, total=3 * KV + 2 * STATE))
    assert store.fits(kv * KV, state * STATE) == fits
    assert store.reserve(kv * KV, state * STATE) == fits


def test_spare_room_counts_the_common_budget_too():
    store = make_store(make_budget(tokens=10, states=2, total=3 * KV + 2 * STATE))
    assert store.spare_tokens() == 10
    assert store.spare_state_bytes() == 2 * STATE
    store.reserve(0, 2 * STATE)
    assert store.spare_tokens() == 3


def test_entries_make_way_one_by_one():
    store = make_store(make_budget(entries=2), eviction="fifo")
    root = store.tree.new_root()
    for tokens in (A, B, C, (3, 3, 3), (3, 9)):
        put(store, root, tokens)
    # (3, 3, 3) extends an entry; (3, 9) is a third one, so B, the oldest, left
    assert sequences(root) == [(3, 3, 3), (3, 9)]


def test_an_entry_is_refused_where_all_others_are_locked():
    store = make_store(make_budget(entries=1))
    root = store.tree.new_root()
    store.lock(put(store, root, A))
    assert not store.reserve_entry(root, string_of([np.array(B, np.int32)]), 2)
    assert sequences(root) == [A]


def test_inserted_minus_evicted_bytes_is_what_is_cached():
    store = make_store(make_budget(tokens=6, states=2), eviction="fifo")
    root = store.tree.new_root()
    for now in range(9):
        put(store, root, (now, 1, 2), states=(1, 3))
    assert store.inserted_bytes == 9 * (3 * KV + 2 * STATE)
    assert store.inserted_bytes - store.evicted_bytes == store.kv_cached + store.state_cached == 6 * KV + 2 * STATE


def test_the_recount_notices_a_miscount():
    store = make_store()
    root = store.tree.new_root()
    put(store, root, (1, 2, 3), states=(2,))
    for owner, counter in (
        *((store, name) for name in ("kv_locked", "state_cached", "state_locked")),
        *((store.tree, name) for name in ("num_tokens", "num_leaves")),
    ):
        setattr(owner, counter, getattr(owner, counter) + 1)
        with pytest.raises(AssertionError):
            recount(store, [root])
        setattr(owner, counter, getattr(owner, counter) - 1)
    recount(store, [root])


def test_giving_back_more_than_was_reserved_is_an_error():
    store = make_store()
    store.reserve(KV, 0)
    with pytest.raises(AssertionError, match="gave back more"):
        store.unreserve(2 * KV, 0)


# -- What counts as a use: hits and insertions refresh whole paths, and the end of a request is a use. ---


def matched(policy: TreePolicy, tokens) -> int:
    """Stored tokens that a prompt would find."""
    return policy.match(make_request(tokens), 0).matched


def test_hit_refreshes_every_node_of_its_path():
    policy = make_policy(make_budget(tokens=12))
    serve(policy, (1, 1, 1, 1), 0)
    serve(policy, (2, 2, 2, 2), 0)
    plan = policy.match(make_request((1, 1, 1, 1, 9, 9)), 0)
    allocation = policy.allocate(plan, 0)
    policy.insert(allocation, 6, 0)
    policy.free(allocation, 0)
    policy.store.evict(2, 0)  # the other prompt is older than anything on the path
    assert matched(policy, (2, 2, 2, 2, 0)) == 0
    policy.store.evict(2, 0)
    assert matched(policy, (1, 1, 1, 1, 9, 9, 0)) == 4


def test_request_that_ends_last_leaves_last():
    policy = make_policy(make_budget(tokens=20))
    _, long = begin(policy, make_request((1, 1, 1, 1)), 0)
    policy.insert(long, 4, 0)
    serve(policy, (2, 2, 2, 2), 0)
    policy.free(long, 0)
    policy.store.evict(1, 0)
    assert (matched(policy, (1, 1, 1, 1, 0)), matched(policy, (2, 2, 2, 2, 0))) == (4, 0)


def test_plan_creates_no_root():
    policy = make_policy()
    before = copy.deepcopy(list(policy.index.all()))
    policy.match(make_request((1, 2, 3), cache_salt="new"), 0)
    assert list(policy.index.all()) == before == []


def test_output_of_one_turn_is_found_by_the_next():
    policy = make_policy(make_budget(tokens=40))
    prompt = make_request((1, 2, 3))
    request = Request(7, 0, prompt.spans, output=Span(make_request((4, 5, 6)).tokens).tokens)
    _, allocation = begin(policy, request, 0)
    policy.insert(allocation, 3, 0)
    assert policy.append(allocation, 3, 5)
    policy.finish(allocation, 2, 0)
    policy.free(allocation, 0)
    policy.check()
    assert matched(policy, (1, 2, 3, 4, 5, 6, 7)) == 5
    assert policy.store.kv_cached == 5 * KV

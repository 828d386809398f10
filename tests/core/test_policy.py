"""Reused and lost tokens of a policy, on traces that are checked by hand or by a naive rule."""

from itertools import pairwise

import numpy as np
import pytest

from spanlab.core.placement import balanced, branch, last, no_states
from spanlab.core.plan import Losses

from ..support.products import every_pair, in_turn
from .factories import (
    BLIND_EVICTIONS,
    KV,
    STATE,
    assert_drained,
    assert_within_budget,
    at,
    begin,
    common,
    counters,
    held,
    make_budget,
    make_policy,
    make_request,
    serve,
)

NONE = dict.fromkeys(Losses._fields, 0)


def losses(**causes: int) -> Losses:
    return Losses(**{**NONE, **causes})


def trace(seed: int, number: int = 60, length: int = 24) -> list[list[int]]:
    """Return prompts that share a prefix of random length with earlier ones."""
    rng = np.random.default_rng(seed)
    prompts: list[list[int]] = [[0]]
    for _ in range(number):
        base = prompts[int(rng.integers(len(prompts)))]
        prefix = base[: int(rng.integers(0, len(base) + 1))]
        prompts.append((prefix + rng.integers(0, 3, int(rng.integers(1, 10))).tolist())[:length])
    return prompts


# -- why a token was not reused: one scenario per cause ---------------------------------------------------------------


def test_never_seen_is_what_no_earlier_prompt_began_with():
    policy = make_policy()
    assert serve(policy, [1, 2, 3, 4], 0).losses == losses(never_seen=4)
    plan = serve(policy, [1, 2, 9, 9], 1)
    assert (plan.resume, plan.losses) == (2, losses(never_seen=2))


def test_never_stored_is_what_a_policy_that_keeps_nothing_computed_before():
    policy = make_policy(keeps=False)
    serve(policy, [1, 2, 3, 4], 0)
    plan = serve(policy, [1, 2, 3, 9], 1)
    assert (plan.resume, plan.losses) == (0, losses(never_stored=3, never_seen=1))
    assert policy.store.inserted_bytes == 0


def test_kv_evicted_counts_evicted_tokens():
    policy = make_policy(make_budget(tokens=4))
    serve(policy, [1, 2, 3], 0)
    serve(policy, [5, 6, 7], 1)
    plan = serve(policy, [1, 2, 9], 2)
    assert (plan.resume, plan.losses) == (0, losses(kv_evicted=2, never_seen=1))


def test_kv_evicted_takes_its_states_along():
    policy = make_policy(make_budget(tokens=4), hybrid=True, placer=at(2))
    serve(policy, [1, 2, 3], 0)
    serve(policy, [5, 6, 7], 1)
    assert serve(policy, [1, 2, 9], 2).losses == losses(kv_evicted=2, never_seen=1)


def test_state_evicted_is_kv_whose_state_gave_way():
    policy = make_policy(make_budget(states=2), hybrid=True, placer=at(2))
    serve(policy, [1, 2, 3, 4], 0)
    serve(policy, [5, 6, 7, 8], 1)  # one state to work with, one to keep: the first prompt's leaves
    plan = policy.match(make_request([1, 2, 3, 9]), 2)
    assert plan.matched == 3
    # without a state at 2, tokens 0 and 1 are lost to its eviction; token 2 never had one close enough
    assert (plan.resume, plan.losses) == (0, losses(state_evicted=2, state_never_placed=1, never_seen=1))


def test_state_never_placed_is_kv_beyond_the_last_state():
    policy = make_policy(hybrid=True, placer=at(2))
    serve(policy, [1, 2, 3, 4, 5], 0)
    plan = serve(policy, [1, 2, 3, 4, 9], 1)
    assert (plan.resume, plan.losses) == (2, losses(state_never_placed=2, never_seen=1))


def test_alignment_is_what_lies_behind_the_last_page():
    policy = make_policy(block_size=4)
    serve(policy, list(range(8)), 0)
    plan = serve(policy, [0, 1, 2, 3, 4, 5, 9, 9], 1)
    assert (plan.resume, plan.losses) == (4, losses(alignment=2, never_seen=2))


def test_alignment_is_what_lies_behind_the_last_grid_position():
    policy = make_policy(hybrid=True, grid=4)
    serve(policy, list(range(8)), 0)
    plan = serve(policy, [0, 1, 2, 3, 4, 5, 9, 9], 1)
    assert (plan.resume, plan.losses) == (4, losses(alignment=2, never_seen=2))


def test_the_last_token_of_a_known_prompt_is_computed():
    policy = make_policy()
    serve(policy, [1, 2, 3, 4], 0)
    plan = serve(policy, [1, 2, 3, 4], 1)
    assert (plan.resume, plan.resumable, plan.losses) == (3, 4, losses(last_token=1))


def test_the_last_token_rule_costs_a_whole_coarse_page():
    policy = make_policy(block_size=4)
    serve(policy, list(range(8)), 0)
    assert serve(policy, list(range(8)), 1).losses == losses(last_token=1, alignment=3)


def test_the_published_study_reuses_the_last_token_too():
    policy = make_policy(last_token=True)
    serve(policy, [1, 2, 3], 0)
    plan = serve(policy, [1, 2, 3], 1)
    assert (plan.resume, plan.losses) == (3, losses())


def test_locked_is_what_the_store_refused():
    policy = make_policy(make_budget(entries=1))
    _, holder = begin(policy, make_request([1, 2, 3]), 0)
    policy.insert(holder, 3, 0)
    serve(policy, [5, 6, 7], 1)  # the one entry is in use
    plan = policy.match(make_request([5, 6, 9]), 2)
    assert (plan.resume, plan.losses) == (0, losses(locked=2, never_seen=1))
    policy.free(holder, 0)
    assert_drained(policy)


def test_entries_stored_after_a_refusal_count_as_evicted():
    policy = make_policy(make_budget(entries=1))
    _, holder = begin(policy, make_request([1, 2, 3]), 0)
    policy.insert(holder, 3, 0)
    serve(policy, [5, 6, 7], 1)  # refused
    policy.free(holder, 0)
    serve(policy, [5, 6, 7], 2)  # stored
    serve(policy, [8, 8, 8], 3)  # takes its place
    plan = policy.match(make_request([5, 6, 9]), 4)
    assert plan.losses == losses(kv_evicted=2, never_seen=1)


# -- stored entries ---------------------------------------------------------------------------------------------------


def test_states_stand_where_they_were_placed_floored_to_the_grid():
    policy = make_policy(hybrid=True, grid=4, placer=at(3, 5, 7, 9, 12))
    serve(policy, list(range(14)), 0)
    assert [len(path) for path in held(policy)[1]] == [4, 8, 12]


def test_the_deepest_states_that_fit_are_captured():
    policy = make_policy(make_budget(states=3), hybrid=True)
    _, allocation = begin(policy, make_request(list(range(6))), 0)
    assert allocation.captures == [5, 6]  # the third is the running one
    policy.free(allocation, 0)


def test_a_branch_state_of_the_second_visit_serves_the_third():
    policy = make_policy(hybrid=True, placer=branch())
    resumes = [serve(policy, [1, 2, 3, question], question).resume for question in (10, 11, 12)]
    assert resumes == [0, 0, 3]


def test_the_longest_private_entry_serves_and_the_oldest_of_equals():
    policy = make_policy(hybrid=True, private=True, placer=last())
    for now, prompt in enumerate(([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4])):
        serve(policy, prompt, now)
    first, second, third = policy.index.all()
    assert policy.match(make_request([1, 2, 3, 4, 5]), 5).cache_spans[-1].match_node.parent is second
    assert policy.match(make_request([1, 2, 3, 9]), 5).cache_spans[-1].match_node.parent is first
    assert len({id(root) for root in (first, second, third)}) == 3


@pytest.mark.parametrize(("capacity", "seed"), in_turn([1, 2, 3, 7], range(4)))
def test_private_entries_first_in_first_out_equal_a_list(seed, capacity):
    """The published study's store: K whole entries; the oldest is evicted before a new one is stored."""
    rng = np.random.default_rng(seed)
    policy = make_policy(
        make_budget(entries=capacity), hybrid=True, private=True, eviction="fifo", last_token=True, grid=4
    )
    entries: list[tuple[int, list[int]]] = []
    for now, prompt in enumerate(trace(seed, 80)):
        group = int(rng.integers(2))
        plan = serve(policy, prompt, now, group=group)
        depths = [common(prompt, stored) for owner, stored in entries if owner == group]
        assert plan.matched == max(depths, default=0)
        assert plan.resume == plan.matched // 4 * 4
        entries = [*entries, (group, prompt)][-capacity:]
        assert policy.store.kv_cached == sum(len(stored) for _, stored in entries) * KV
        assert policy.store.state_cached == sum(len(stored) // 4 for _, stored in entries) * STATE


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("unit", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_without_a_budget_dense_states_save_the_longest_common_prefix(seed, unit, hybrid):
    policy = make_policy(hybrid=hybrid, grid=unit if hybrid else 1, block_size=1 if hybrid else unit)
    earlier: list[list[int]] = []
    for now, prompt in enumerate(trace(seed)):
        longest = max((common(prompt, other) for other in earlier), default=0)
        plan = serve(policy, prompt, now)
        assert plan.seen == longest
        assert plan.resume == min(longest, len(prompt) - 1) // unit * unit
        assert plan.losses.kv_evicted == plan.losses.state_evicted == plan.losses.state_never_placed == 0
        earlier.append(prompt)


@pytest.mark.parametrize("hybrid", [False, True])
def test_without_a_budget_every_eviction_order_does_the_same(hybrid):
    outcomes = []
    for eviction in BLIND_EVICTIONS:
        policy = make_policy(hybrid=hybrid, placer=balanced(2) if hybrid else None, eviction=eviction)
        plans = [serve(policy, prompt, now) for now, prompt in enumerate(trace(7))]
        outcomes.append(([(p.matched, p.resume, p.losses) for p in plans], held(policy), counters(policy.store)))
    assert all(outcome == outcomes[0] for outcome in outcomes)


def interleave(policy, seed: int, steps: int = 400) -> list[tuple]:
    """Serve up to three requests at once, in chunks; return the decision on each."""
    rng = np.random.default_rng(seed)
    prompts, decisions, running = trace(seed, 200), [], []
    for now in range(steps):
        if len(running) < 3 and prompts and rng.random() < 0.5:
            plan = policy.match(make_request(prompts.pop()), now)
            allocation = policy.allocate(plan, now)
            decisions.append((plan.prompt, plan.seen, plan.matched, plan.resume, plan.losses, allocation is not None))
            if allocation is not None:
                running.append((plan, allocation, plan.resume))
        elif running:
            plan, allocation, computed = running.pop(int(rng.integers(len(running))))
            if computed < plan.prompt:
                computed = int(rng.integers(computed, plan.prompt)) + 1
                policy.insert(allocation, computed, now)
                running.append((plan, allocation, computed))
            else:
                policy.free(allocation, 0)
        assert_within_budget(policy.store)
    for _, allocation, _ in running:
        policy.free(allocation, 0)
    policy.check()
    assert_drained(policy)
    return decisions


@pytest.mark.parametrize(("eviction", "private", "hybrid"), every_pair(BLIND_EVICTIONS, [False, True], [False, True]))
def test_the_same_operations_give_the_same_answers(hybrid, private, eviction):
    runs = []
    for _ in range(2):
        policy = make_policy(
            make_budget(tokens=90, states=40, entries=6), hybrid=hybrid, private=private, eviction=eviction
        )
        runs.append((interleave(policy, 5), held(policy), counters(policy.store)))
    assert runs[0] == runs[1]
    assert any(answer[3] for answer in runs[0][0]), "nothing was reused, so nothing was compared"
    assert policy.store.evicted_bytes > 0, "nothing was evicted, so nothing was compared"


@pytest.mark.parametrize("hybrid", [False, True])
def test_room_for_one_request_alone_reuses_only_the_request_before(hybrid):
    """Prompts of ten tokens and a budget of ten: a running request displaces all tokens that it does not share."""
    budget = make_budget(total=10 * KV + (2 * STATE if hybrid else 0))
    policy = make_policy(budget, hybrid=hybrid, placer=last() if hybrid else None)
    rng = np.random.default_rng(1)
    for now in range(100):
        prompt = [int(rng.integers(2)) + 10 * now, *rng.integers(0, 2, 9).tolist()]
        plan = serve(policy, prompt, now)
        assert (plan.matched, plan.resume) == (0, 0)
        assert_within_budget(policy.store)
        assert policy.store.kv_cached == 10 * KV


@pytest.mark.parametrize(
    ("budget", "hybrid", "stored", "prompt"),
    [
        # one token of a long edge is read, the whole edge is locked
        (make_budget(tokens=12), False, range(10), [0, *range(20, 29)]),
        # nothing is read, but the match is locked beside the recomputed KV
        (make_budget(tokens=12), True, range(10), [*range(9), 99]),
        # a state is read: it is locked beside the working state, so two must fit
        (make_budget(total=10 * KV + 2 * STATE), True, range(5), range(10)),
    ],
    ids=["long-edge", "kv-without-state", "state"],
)
def test_a_request_that_fits_alone_is_admitted_when_idle(budget, hybrid, stored, prompt):
    policy = make_policy(budget, hybrid=hybrid, placer=last() if budget.kv_bytes > 1000 else no_states())
    serve(policy, list(stored), 0)
    assert policy.allocate(policy.match(make_request(list(prompt)), 1), 1) is not None


# -- capacity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_lru_hits_grow_with_capacity_block_by_block(seed):
    """With unit blocks and one request at a time, a larger cache contains a smaller one, so it reuses no less."""
    block, rng = 4, np.random.default_rng(seed)
    heads = [rng.integers(0, 50, 12).tolist() for _ in range(6)]
    prompts = [
        heads[int(rng.zipf(1.5)) % 6][: int(rng.integers(1, 13))] + rng.integers(0, 3, 9).tolist() for _ in range(100)
    ]
    resumes = []
    for capacity in range(24, 200, block):
        policy = make_policy(make_budget(tokens=capacity), block_size=block, fixed_blocks=True)
        resumes.append([serve(policy, prompt, now).resume for now, prompt in enumerate(prompts)])
    for smaller, larger in pairwise(resumes):
        assert all(one <= other for one, other in zip(smaller, larger, strict=True))
    assert sum(resumes[0]) < sum(resumes[-1])

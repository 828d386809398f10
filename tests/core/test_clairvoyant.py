"""The clairvoyant placement, against other placements and by hand."""

import numpy as np
import pytest

from spanlab.core.placement import ArmFacts, Clairvoyant, Departures, Placer, balanced, branch, every_n, last, tail
from spanlab.core.request import Request
from spanlab.core.rules import StorageRules
from spanlab.core.tree import shared_name, whole
from spanlab.offline.forest import ServiceOrder, build_forest, find_reuses, salted_parent

from .factories import make_policy, make_request, serve_prompt

GRID = 4
FORM = StorageRules(whole, shared_name, GRID)


def facts_of(requests) -> ArmFacts:
    return ArmFacts(GRID, GRID, 0, 200, departures=Departures(requests, FORM))


def forked(seed: int, count: int) -> list[Request]:
    """Return prompts that each diverge from an earlier one at a random depth, possibly zero."""
    rng, prompts = np.random.default_rng(seed), [[7_000_000]]
    for number in range(count):
        before = prompts[rng.integers(len(prompts))]
        prefix = before[: rng.integers(len(before) + 1)]
        prompts.append([*prefix, *(1_000 * (number + 1) + np.arange(rng.integers(1, 60)))])
    return [make_request(tuple(tokens), id=number) for number, tokens in enumerate(prompts)]


def reused(requests: list[Request], placer: Placer) -> int:
    """Return the reused tokens of requests one after another with unlimited memory."""
    policy = make_policy(hybrid=True, grid=GRID, placer=placer)
    return sum(serve_prompt(policy, request, now).reused for now, request in enumerate(requests))


@pytest.mark.parametrize("seed", range(6))
def test_with_room_a_clairvoyant_reuses_all_there_is(seed):
    requests, order = forked(seed, 40), np.arange(41)
    forest = build_forest(requests, StorageRules(whole, salted_parent, GRID))
    infinite = find_reuses(forest, ServiceOrder(order, order, order, np.ones(41, np.bool_))).infinite_tokens
    facts = facts_of(requests)
    most = max(len(facts.departures.along(request)) for request in requests)
    assert reused(requests, Clairvoyant(facts=facts)) == reused(requests, Clairvoyant(most, facts=facts)) == infinite
    placers = every_n(GRID), every_n(3 * GRID), last(), branch(), balanced(most), tail(most, facts=facts)
    assert max(reused(requests, placer) for placer in placers) <= infinite
    assert reused(requests, Clairvoyant(1, facts=facts)) <= infinite


def test_states_stand_where_later_prompts_leave():
    first = tuple(range(40))
    leaving = [(*first[:depth], 900 + n) for n, depth in enumerate((10, 10, 33, 21, 10))]
    requests = [make_request(tokens, id=number) for number, tokens in enumerate([first, *leaving])]
    along = Departures(requests, FORM).along
    assert along(requests[0]) == {8: 3, 32: 1, 20: 1}
    assert along(requests[1]) == {8: 2}
    assert along(requests[5]) == {}


def test_few_states_stand_where_they_save_most():
    first = tuple(range(40))
    leaving = [(*first[:depth], 900 + n) for n, depth in enumerate((8, 32, 32, 20, 20, 20))]
    requests = [make_request(tokens, id=number) for number, tokens in enumerate([first, *leaving])]
    facts = facts_of(requests)
    policy = make_policy(hybrid=True, grid=GRID, placer=Clairvoyant(1, facts=facts))
    allocation = policy.allocate(policy.match(requests[0], 0), 0)
    assert allocation.captures == [20]  # saves 20 tokens to five of the six; 32 tokens to two

"""What counts as a use: hits and insertions refresh whole paths, and the end of a request is a use."""

import copy

from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request, Span

from .factories import KV, begin, make_budget, make_policy, make_request, serve


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

"""Rules for states of the field, each by hand, and states that are taken as tokens are computed."""

import numpy as np
import pytest

from spanlab.core.placement import chunk_end, decode_interval, last, response_end, retention, second_hit
from spanlab.core.request import Request, Span
from spanlab.core.rules import CacheRules, Progress, merge_progress

from .factories import STATE, at, begin, make_budget, make_facts, make_info, make_policy, make_request, serve

UNIT = make_facts(4)


@pytest.mark.parametrize(
    ("rule", "info", "positions"),
    [
        # A repeated prompt of 12 computes its last token, so that 8 is the last boundary it can resume at.
        (retention(facts=UNIT), make_info(12), [8]),
        (retention(facts=UNIT), make_info(13), [12]),
        (retention(facts=UNIT), make_info(4), []),
        (retention(facts=UNIT), make_info(30, matched=19), [16, 28]),
        (retention(facts=UNIT), make_info(30, matched=19, resume=16), [28]),
        (retention(facts=UNIT), make_info(12, matched=12), [8]),
        (retention(8, facts=UNIT), make_info(30, matched=13), [8, 12, 16, 24, 28]),
        (second_hit(), make_info(30), []),
        (second_hit(), make_info(30, seen=17), [17]),  # whatever is stored of it
        (second_hit(), make_info(30, seen=17, resume=17), []),
        (second_hit(8), make_info(30, seen=17), [8, 16, 17]),
        (second_hit(8), make_info(30, seen=16), [8, 16]),
        (chunk_end(facts=UNIT), make_info(30), []),
        (decode_interval(8), make_info(30), []),
        (response_end(facts=UNIT), make_info(30), []),
    ],
)
def test_a_rule_places_exactly_there(rule, info, positions):
    rule.observe(info)
    assert list(rule.place(info)) == positions


def test_second_hit_gives_evicted_prefixes_a_state():
    policy = make_policy(make_budget(tokens=12), hybrid=True, placer=second_hit())
    shared = [1, 2, 3, 4, 5, 6]
    serve(policy, [*shared, 7], 0)
    serve(policy, list(range(20, 32)), 1)  # takes all memory
    assert serve(policy, [*shared, 8], 2).matched == 0
    assert serve(policy, [*shared, 9], 3).resume == 6


# -- as tokens are computed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("progress", "prompt", "tokens", "positions"),
    [
        (Progress(chunk=4), 30, (0, 10), [8]),
        (Progress(chunk=4), 30, (9, 11), []),
        (Progress(chunk=4), 30, (24, 40), [28]),  # output that is computed again has no ends of chunks
        (Progress(chunk=4), 30, (30, 40), []),
        (Progress(interval=8), 30, (0, 30), []),
        (Progress(interval=8), 30, (30, 31), []),
        (Progress(interval=8), 30, (31, 32), [32]),
        (Progress(interval=8), 30, (30, 50), [32, 40, 48]),
        (Progress(interval=8), 32, (32, 33), []),
        (Progress(newest=4), 30, (30, 37), [32, 36]),
        (Progress(interval=12, newest=8), 30, (30, 50), [32, 36, 40, 48]),
    ],
)
def test_progress_takes_states_exactly_there(progress, prompt, tokens, positions):
    assert list(progress.positions(prompt, *tokens)) == positions


@pytest.mark.parametrize("progress", [Progress(interval=8), Progress(newest=4), Progress(interval=12, newest=8)])
def test_equal_steps_end_before_the_next_state(progress):
    prompt = 30
    for reached in range(31, 60):
        steps = progress.equal_steps([reached])
        captures = [bool(progress.positions(prompt, p - 1, p)) for p in range(reached, reached + steps)]
        assert captures == [True] or not any(captures)


def test_several_followed_placements_are_one():
    facts = make_facts(4)
    parts = [chunk_end(facts=facts), decode_interval(12), response_end(8, facts=facts)]
    assert merge_progress([placement.progress for placement in parts]) == Progress(4, 12, 8)
    assert merge_progress([]) is None


def decoded(policy, prompt, output, now=0):
    """Serve one request to the end of its output, token by token."""
    request = Request(now, 0, (Span(np.array(prompt, np.int32)),), len(output), output=np.array(output, np.int32))
    plan, allocation = begin(policy, request, now)
    policy.insert(allocation, plan.prompt, now)
    num_held = len(prompt) + len(output) - 1
    for token in range(len(prompt), num_held):
        assert policy.append(allocation, token, token + 1)
        policy.check()
    policy.finish(allocation, num_held - len(prompt), now)
    policy.free(allocation, now)
    policy.check()
    return plan


def stored(policy, tokens):
    return policy.checkpoints(make_request(tokens))


TURN, ANSWER = list(range(10)), list(range(50, 70))


@pytest.mark.parametrize(
    ("progress", "positions"),
    [
        (None, [10]),
        (Progress(newest=4), [10, 28]),  # 29 tokens are computed: the newest one never is
        (Progress(interval=8), [10, 16, 24]),
        (Progress(interval=8, newest=4), [10, 16, 24, 28]),
    ],
)
def test_output_is_kept_up_to_its_last_state(progress, positions):
    policy = make_policy(hybrid=True, placer=last(), progress=progress)
    decoded(policy, TURN, ANSWER)
    assert stored(policy, [*TURN, *ANSWER]) == positions
    assert policy.store.tree.num_tokens == positions[-1]
    plan = serve(policy, [*TURN, *ANSWER, 5, 6, 7], 1)
    assert plan.resume == positions[-1]


def test_newest_states_of_an_output_share_one_place():
    policy = make_policy(make_budget(tokens=60, states=3), hybrid=True, placer=at(10), progress=Progress(newest=4))
    decoded(policy, TURN, ANSWER)  # its own, the prompt's, and one for all of the output
    assert stored(policy, [*TURN, *ANSWER]) == [10, 28]


def test_a_state_without_room_is_not_taken():
    policy = make_policy(make_budget(tokens=60, states=1), hybrid=True, placer=at(10), progress=Progress(interval=4))
    decoded(policy, TURN, ANSWER)
    assert policy.store.state_cached == 0


def test_needs_count_the_states_of_an_output():
    request = make_request(TURN, output=20)
    for progress, states in ((None, 1), (Progress(newest=4), 2), (Progress(interval=8), 4)):
        assert make_policy(hybrid=True, progress=progress).need(request).state_bytes == states * STATE


def test_chunks_leave_states_at_their_ends():
    policy = make_policy(hybrid=True, placer=at(), progress=Progress(chunk=4), grid=4)
    _, allocation = begin(policy, make_request(range(30)), 0)
    for start, stop in ((0, 11), (11, 13), (13, 14), (14, 30)):
        assert policy.append(allocation, start, stop)
        policy.insert(allocation, stop, 0)
        policy.check()
    policy.free(allocation, 0)
    assert stored(policy, range(30)) == [8, 12, 28]


# -- a cap on the states of a path ------------------------------------------------------------------------------------


def capped(most: int):
    return make_policy(hybrid=True, placer=at(2, 4, 6, 8), cache=CacheRules(states_per_path=most))


def test_a_cap_prunes_the_shallowest_states():
    policy = capped(2)
    serve(policy, range(9), 0)
    assert stored(policy, range(9)) == [6, 8]
    assert policy.store.tree.num_tokens == 9
    assert policy.store.evicted_bytes == 2 * STATE


def test_a_cap_spares_forks_and_the_tail():
    policy = capped(1)
    policy.rules.cache.states_per_path = None
    serve(policy, [0, 1, 2, 3, 4, 5, 6], 0)
    serve(policy, [0, 1, 2, 3, 9, 9], 1)  # a fork behind token 4, with a state there
    policy.rules.cache.states_per_path = 1
    serve(policy, [0, 1, 2, 3, 4, 5, 6, 7, 8], 2)
    assert stored(policy, range(9)) == [4, 8]


def test_a_cap_spares_states_in_use():
    policy = capped(1)
    serve(policy, range(3), 0)  # a state at 2
    _, reader = begin(policy, make_request([0, 1, 9]), 1)
    serve(policy, range(9), 2)
    assert stored(policy, range(9)) == [2, 8]
    policy.free(reader, 3)

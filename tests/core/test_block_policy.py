"""Decisions of vLLM's rules, case by case; comparisons with vLLM are in tests/oracle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.policies.block_pool import BlockPool, BlockRules, BlockStore
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.request import Request, Span

from .steps import serve_waves

SIZE = 4


def make_policy(blocks=100, states="none", retention=0, groups=1):
    rules = BlockRules(SIZE, states, groups, retention)
    return BlockPolicy(rules, BlockStore(BlockPool(blocks), 1, 1))


def request(id, tokens, output=1, cache_salt="", output_ids=()):
    array = np.array(list(tokens), np.int32)
    answer = np.array(output_ids, np.int32) if len(output_ids) else None
    return Request(id, 0, (Span(array),), output, cache_salt=cache_salt, output=answer)


def reused(sequences):
    return {id: sequence.first_plan.resume for id, sequence in sorted(sequences.items())}


def test_requests_of_one_step_share_blocks():
    sequences = serve_waves(make_policy(), [[request(id, range(10)) for id in range(3)]])
    assert reused(sequences) == {0: 0, 1: 8, 2: 8}


def test_a_fully_known_prompt_recomputes_its_last_block():
    sequences = serve_waves(make_policy(), [[request(0, range(8))], [request(1, range(8))]])
    assert reused(sequences)[1] == 4


def test_the_next_turn_finds_generated_tokens():
    answer = [90, 91, 92, 93, 94, 95]
    prompt = [*range(7), *answer, 60, 61]
    sequences = serve_waves(make_policy(), [[request(0, range(7), 6, output_ids=answer)], [request(1, prompt)]])
    assert reused(sequences)[1] == 12  # 13 tokens are known, the last output token was never computed
    sequences = serve_waves(make_policy(), [[request(0, range(7), 6)], [request(1, prompt)]])
    assert reused(sequences)[1] == 4, "an output without known ids is in no prompt"


def test_a_preempted_request_finds_its_own_blocks():
    sequences = serve_waves(make_policy(blocks=9), [[request(0, range(8), 14), request(1, range(50, 58), 14)]])
    assert sequences[1].preemptions == 1
    assert sequences[1].recomputed < 8, "only evicted blocks are computed again"


def test_requests_wait_for_a_state_written_this_step():
    starts = []

    def note(step):
        starts.append({chunk.sequence.request.id: chunk.start for chunk in step.chunks})

    waves = [[request(0, range(10)), request(1, range(10))]]
    sequences = serve_waves(make_policy(states="align", retention=None), waves, each_step=note)
    # step 0 writes the state at 8, and in step 1 it is still withheld as the prompt's last one
    assert starts == [{0: 0}, {0: 8}, {1: 8}]
    assert reused(sequences) == {0: 0, 1: 8}


def test_a_shared_prefix_gets_a_state_at_its_junction():
    shared = list(range(13))
    waves = [[request(id, [*shared, *range(100 * id + 100, 100 * id + 120)])] for id in range(3)]
    sequences = serve_waves(make_policy(states="align"), waves)
    assert reused(sequences) == {0: 0, 1: 0, 2: 12}


def test_every_group_of_states_takes_blocks():
    policy = make_policy(states="align", groups=3)
    serve_waves(policy, [[request(0, range(10))]])
    assert policy.store.state_cached == 3 * policy.store.kv_cached // 2


@pytest.mark.parametrize("states", ["none", "align"])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_tokens_reused_and_lost_sum_to_the_prompt(states, data):
    source = data.draw(st.lists(st.integers(0, 1), min_size=12, max_size=24))
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 5)), min_size=1))
    waves = [[request(id, source[:n], out)] for id, (n, out) in enumerate(lengths)]
    blocks = data.draw(st.integers(8, 20))
    for sequence in serve_waves(make_policy(blocks, states), waves).values():
        plan = sequence.first_plan
        assert plan.resume + sum(plan.losses) == plan.prompt
        assert min(plan.losses) >= 0
        assert plan.resume <= plan.matched <= plan.seen <= plan.prompt


@given(st.lists(st.integers(0, 1), min_size=1, max_size=20))
@settings(max_examples=30, deadline=None)
def test_looking_for_a_plan_changes_nothing(tokens):
    policy = make_policy(blocks=12, states="align")
    serve_waves(policy, [[request(0, [*tokens, 0, 1, 1])]])
    before = list(policy.store.pool.waiting())
    for _ in range(2):
        policy.match(request(1, tokens), 0)
    assert list(policy.store.pool.waiting()) == before


def test_one_state_is_enough_within_one_block():
    policy = make_policy(blocks=2, states="align")
    assert (policy.need(request(0, range(2), 3)).state_bytes, policy.need(request(0, range(2), 4)).state_bytes) == (
        1,
        2,
    )
    assert reused(serve_waves(policy, [[request(0, range(2), 3)]])) == {0: 0}


def test_an_eviction_that_is_owed_loses_no_block_of_an_equal_run():
    """The owed eviction cuts the free run of a prompt, and with it the equal run that is released next."""
    policy = make_policy(blocks=8)
    first, second, other = (
        policy.allocate(policy.match(request(number, tokens, 8), 0), 0)
        for number, tokens in enumerate([range(12), range(12), range(50, 54)])
    )
    for allocation, stop in ((first, 12), (second, 12), (other, 4)):
        assert policy.append(allocation, 0, stop)
    policy.free(first, 1)
    for stop in range(5, 11):  # one block more than are blank
        assert policy.append(other, stop - 1, stop)
    policy.free(second, 2)
    policy.free(other, 3)
    policy.check()
    assert policy.store.pool.num_free == 8

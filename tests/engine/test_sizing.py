"""Pages for a run: never too few, refused where one request could not be served at all."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.admission import BatchRules
from spanlab.engine.load import pool_pages, stored_tokens

from .factories import (
    APART,
    HEAD,
    arm,
    document,
    least_budget,
    make_policy,
    make_request,
    make_small,
    questions,
    run,
    text,
)

LENGTHS = (20, 9, 33)


@pytest.mark.parametrize(
    ("name", "copies", "sequences"),
    [
        ("none", 0, 1),
        ("pic", 0, 5),
        ("pic_turned", 62, 8),
        ("cache_blend_15", 62, 8),
        ("lego_link_16", 16 + 9 + 16, 8),
        ("last_16", 20 + 9 + 17, 8),
        ("strided_15", 62, 8),
        ("as_seen", 0, 5),
    ],
)
def test_what_one_request_may_need(name, copies, sequences):
    request = questions([(0, 1, 2)], LENGTHS, output=4)[0]
    block_size = 16 if name in ("lego_link_16", "last_16", "strided_15") else 1
    need = make_policy(make_small(), arm(name, block_size)).need(request)
    assert need[:3] == (11 + 62 + 7 + 3 + copies, copies, sequences)


@pytest.mark.parametrize(("block_size", "stored"), [(1, 11 + 62 + 7 + 7 + 7), (16, 16 + 32)])
def test_what_is_stored_in_the_end_is_counted_once(block_size, stored):
    requests = questions([(0, 1, 2), (2, 1, 0), (1, 2)], LENGTHS)
    strategy = arm("pic", block_size)
    assert stored_tokens(make_policy(make_small(), strategy), requests) == stored
    assert len(run(make_small(), strategy, requests).stored) == stored // block_size


def test_unlimited_memory_holds_all_entries_and_requests():
    requests = questions([(0, 1, 2), (2, 1, 0), (1, 2)], LENGTHS, output=4)
    policy = make_policy(make_small(), arm("pic", 1))
    each = [11 + 62 + 7 + 3] * 2 + [11 + 42 + 7 + 3]
    for seats in (1, 2, 3, 9):
        assert pool_pages(policy, BatchRules(max_num_seqs=seats), requests, 512) == 94 + 3 * 3 + sum(each[:seats])
    assert pool_pages(make_policy(make_small(), arm("none")), BatchRules(max_num_seqs=1), requests, 512) == 83


@pytest.mark.parametrize("block_size", [1, 4])
def test_stored_answers_have_room(block_size):
    requests = [make_request(number, text(number, 5), output=8, at=number * APART) for number in range(20)]
    result = run(make_small(), arm("radix", block_size), requests)
    assert len(result.stored) * block_size == stored_tokens(result.engine.policy, requests) > 200


def test_a_token_budget_is_rounded_up_per_broken_page():
    requests = questions([(0, 1, 2), (2, 1, 0), (1, 2)], LENGTHS, output=4)
    policy = make_policy(make_small(), arm("pic", 16), budget=100)
    assert pool_pages(policy, BatchRules(max_num_seqs=2), requests, 512) == (100 + 2 * 16 + 2 * 5 * 15) // 16


ANY_ARM = ["none", "radix", "pic", "pic_turned", "lego_link_16", "random_16", "cache_blend_15", "as_seen_blend_15"]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_pool_never_runs_dry(data):
    """The pool of a run has exactly the computed size, and `allocate` raises beyond it."""
    strategy = arm(data.draw(st.sampled_from(ANY_ARM)), data.draw(st.sampled_from([1, 4, 16])))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=3, max_size=3))
    orders = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=3), min_size=1, max_size=6))
    gap = data.draw(st.sampled_from([0, 10**6, APART]))
    output = data.draw(st.integers(1, 12))
    requests = questions(orders, lengths, head=data.draw(st.integers(0, 20)), output=output, at=gap)
    rules = BatchRules(
        max_num_batched_tokens=data.draw(st.integers(4, 80)),
        max_num_seqs=data.draw(st.integers(1, 4)),
        enable_chunked_prefill=data.draw(st.booleans()),
        prefill_first=data.draw(st.booleans()),
    )
    least = least_budget(make_small(), strategy, requests)
    budget = data.draw(st.sampled_from([None, least, least + 30]))
    result = run(make_small(), strategy, requests, rules=rules, budget=budget)
    assert len(result.records) == len(requests)


def test_a_prompt_longer_than_the_models_context_is_refused():
    longest = make_request(3, text(HEAD, 500), output=13)
    policy = make_policy(make_small(), arm("pic"))
    assert pool_pages(policy, BatchRules(max_num_seqs=1), [longest], 512) > 0
    with pytest.raises(ValueError, match=r"^request 3 has 513 tokens, its answer included: expected at most 512, "):
        pool_pages(policy, BatchRules(), [make_request(1, text(HEAD, 9)), replace(longest, output_len=14)], 512)


def test_a_store_too_small_for_one_request_is_refused():
    request = make_request(7, text(HEAD, 11), document(0, 80), text(5, 6), output=4)
    strategy = arm("pic_turned")
    run(make_small(), strategy, [request], budget=180)
    with pytest.raises(
        ValueError,
        match=r"^store.kv_gib=0.000128: expected at least 0.000129, for request 7 alone may need 180 tokens of KV, "
        "80 of them in copies of its own$",
    ):
        run(make_small(), strategy, [request], budget=179)

"""A prompt that holds one document twice: the second is read from the first one's blocks, cold or warm."""

import pytest

from spanlab.core.repair import Repair
from spanlab.core.tree import as_seen, conditioned, isolated, repeats

from .factories import (
    KV,
    assert_drained,
    begin,
    doc,
    finish,
    make_budget,
    make_policy,
    make_prompt,
    resumes,
    serve_prompt,
    text,
)

HEAD, ONE, TWO, TAIL = text(1, 2), doc(10, 11, 12, 13), doc(20, 21, 22), text(5, 6)


TWICE = make_prompt(HEAD, ONE, TWO, ONE, TAIL)  # [0, 2) [2, 6) [6, 9) [9, 13) [13, 15)


@pytest.mark.parametrize("layout", [isolated, conditioned])
@pytest.mark.parametrize("block_size", [1, 3])
def test_a_document_twice_in_a_cold_prompt_is_computed_once(layout, block_size):
    policy = make_policy(layout=layout, block_size=block_size)
    plan, allocation = begin(policy, TWICE, 0)
    assert resumes(plan) == [0, 0, 0, 4, 0]
    assert (plan.seen, plan.reused, plan.losses.never_seen) == (4, 4, 11)
    assert [(work.start, work.stop) for work in allocation.work] == [(0, 2), (2, 6), (6, 9), (13, 15)]
    assert allocation.kv_bytes == 11 * KV, "the second one takes no memory"
    finish(policy, allocation, 0)
    assert_drained(policy)
    assert policy.match(TWICE, 1).reused == (14 if block_size == 1 else 3 + 3 + 4)


def test_a_document_twice_is_held_once_where_it_is_found():
    policy = make_policy(make_budget(tokens=15), layout=isolated)
    serve_prompt(policy, make_prompt(HEAD, ONE, TAIL), 0)
    plan, allocation = begin(policy, TWICE, 1)
    assert resumes(plan) == [2, 4, 0, 4, 0]
    assert policy.store.kv_locked + allocation.kv_bytes == 11 * KV
    finish(policy, allocation, 1)


def test_a_repeated_document_is_read_twice_without_other_reuse():
    policy = make_policy(layout=isolated)
    serve_prompt(policy, TWICE, 0)
    whole_plan = policy.match(TWICE, 1).without_reuse()
    assert resumes(whole_plan) == [0, 0, 0, 4, 0]
    assert whole_plan.reused + sum(whole_plan.losses) == whole_plan.prompt


def test_a_cold_baseline_and_documents_as_seen_compute_it_twice():
    assert policy_reuses(make_policy(layout=isolated, keeps=False)) == 0
    assert policy_reuses(make_policy(layout=as_seen)) == 0


def policy_reuses(policy) -> int:
    return policy.match(TWICE, 0).reused


def test_two_repairs_of_one_document_are_two():
    policy = make_policy(layout=isolated, repair=Repair("first", k=2))
    plan, allocation = begin(policy, TWICE, 0)
    assert (plan.repaired, plan.losses.repair, plan.reused) == (6, 2, 2)
    assert plan.reused + sum(plan.losses) == plan.prompt
    finish(policy, allocation, 0)


def test_spans_with_other_pasts_or_tokens_are_no_repeats():
    assert repeats(isolated(TWICE)) == {3: 1}
    assert repeats(isolated(make_prompt(ONE, ONE, ONE, TAIL))) == {1: 0, 2: 0}
    assert repeats(isolated(make_prompt(HEAD, ONE, doc(10, 11, 12), TAIL))) == {}
    assert repeats(isolated(make_prompt(text(1), TAIL, ONE, text(10, 11, 12, 13)))) == {}
    assert repeats(as_seen(TWICE)) == {}
    assert repeats(isolated(make_prompt(HEAD, ONE, ONE))) == {}, "the last token is ordered text"


@pytest.mark.parametrize("copies", [False, True])
def test_what_a_request_may_need_counts_a_document_once(copies):
    need = make_policy(layout=isolated, copies=copies).need(TWICE)
    copied = (4 + 3 + 4) * copies
    assert (need.tokens, need.copies) == (11 + copied, copied)
    assert need.sequences == 4 + 3 * copies

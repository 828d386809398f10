"""One document twice in a prompt: read from one set of pages at two places, by every method, against its oracle."""

import pytest

from spanlab.core.admission import BatchRules

from ..support.products import in_turn
from .factories import arm, make_small, questions, start
from .oracles import run_checked

LENGTHS, ORDERS = (35, 20), [(0, 1, 0), (0, 0), (1, 0, 1, 0)]
METHODS = (
    "pic",
    "pic_raw",
    "pic_turned",
    "lego_link_16",
    "random_16",
    "cache_blend_15",
    "cache_blend_lmcache_15",
    "ape",
)


@pytest.mark.parametrize(("block_size", "name"), in_turn([1, 16], METHODS))
def test_logits_are_the_methods_own_while_requests_meet(name, block_size):
    requests, rules = questions(ORDERS, LENGTHS, output=3, at=0), BatchRules(max_num_batched_tokens=40, max_num_seqs=3)
    result = run_checked(make_small(), arm(name, block_size), requests, rules=rules)
    stored = {"head": 11, "documents": 35 + 20, "text": 3 * 7, "output": 3 * 2}  # each document once
    if block_size == 1 and name.startswith("pic"):
        assert len(result.stored) == sum(stored.values())


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_cold_prompt_computes_the_document_once(forwarded, block_size):
    (request,) = questions([(0, 1, 0, 0)], LENGTHS)
    run_result = start(make_small(), arm("pic", block_size), [request])
    forwarded.clear()
    record = run_result.serve([request]).records[0]
    assert sum(forwarded) == record.computed_tokens == 11 + 35 + 20 + 7
    assert (record.reused_tokens, record.seen_tokens, record.lost_never_seen) == (70, 0, 73)

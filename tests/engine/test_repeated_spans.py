"""One document twice in a prompt: read from one set of pages at two places, by every method, against its oracle."""

from __future__ import annotations

import pytest

from spanlab.core.batch_rules import BatchRules

from .factories import arm, make_small, nothing_leaks, questions, run
from .oracles import wrong

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


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("name", METHODS)
def test_logits_are_the_methods_own_while_requests_meet(name, block_size):
    requests, strategy = questions(ORDERS, LENGTHS, output=3, at=0), arm(name, block_size)
    rules = BatchRules(max_num_batched_tokens=40, max_num_seqs=3)
    result = run(make_small(), strategy, requests, rules=rules)
    assert max(wrong(result, strategy, request) for request in requests) < 1e-4
    assert nothing_leaks(result)


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_cold_prompt_computes_the_document_once(monkeypatch, block_size):
    (request,) = questions([(0, 1, 0, 0)], LENGTHS)
    model, rows = make_small(), []
    forward = type(model).forward

    def counted(self, ids, *rest, **more):
        rows.append(len(ids))
        return forward(self, ids, *rest, **more)

    monkeypatch.setattr(type(model), "forward", counted)
    record = run(model, arm("pic", block_size), [request]).records[0]
    assert sum(rows) == record.computed_tokens == 11 + 35 + 20 + 7
    assert (record.reused_tokens, record.seen_tokens, record.lost_never_seen) == (70, 70, 73)

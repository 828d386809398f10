"""Repairs cut by the token budget: the logits of the uncut pass, whatever the chunks."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from spanlab.core.batch_rules import BatchRules

from .factories import HEAD, arm, document, make_request, make_small, nothing_leaks, run, text
from .oracles import far, wrong

ARMS = ("lego_link_16", "random_16", "last_16", "strided_15")


def prompts():
    """Three that meet, with text between their documents and one document twice."""
    return [
        make_request(0, text(HEAD, 9), document(0, 20), text(5, 6), document(1, 33), text(6, 8), output=5),
        make_request(1, text(HEAD, 9), document(1, 33), document(0, 20), document(1, 33), text(7, 3), output=5),
        make_request(2, document(2, 18), text(5, 6), document(0, 20), text(8, 4), output=5),
    ]


def arm_of(name: str, block_size: int, **spans: object):
    """The arm with documents half of which are repaired, so that a repair has many chunks."""
    repair = asdict(arm(name).spans.repair)
    return arm(name, block_size, repair | ({"ratio": 0.5} if repair["ratio"] else {}), **spans)


@pytest.mark.parametrize("budget", [5, 16, 23])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("name", ARMS)
def test_logits_are_those_of_the_dense_repair(name, block_size, budget):
    requests, strategy = prompts(), arm_of(name, block_size)
    result = run(make_small(), strategy, requests, rules=BatchRules(max_num_batched_tokens=budget, max_num_seqs=3))
    assert max(wrong(result, strategy, request) for request in requests) < 1e-4
    assert nothing_leaks(result)


@pytest.mark.parametrize("kernel", ["rotate_keys", "pre_rotated"])
def test_every_kernel_repairs_in_chunks(kernel):
    form = {
        "rotate_keys": {"keys": "raw", "kernel": "rotate_keys"},
        "pre_rotated": {"kernel": "pre_rotated", "sharing": "private"},
    }[kernel]
    requests, strategy = prompts(), arm_of("lego_link_16", 16, **form)
    result = run(make_small(), strategy, requests, rules=BatchRules(max_num_batched_tokens=11, max_num_seqs=3))
    assert max(wrong(result, strategy, request) for request in requests) < 1e-4
    assert nothing_leaks(result)


def test_chunked_and_uncut_say_the_same():
    requests, logits = prompts(), []
    for chunked in (None, False):
        strategy = arm_of("random_16", 1)
        strategy.spans.repair.chunked = chunked
        result = run(make_small(), strategy, requests, rules=BatchRules(max_num_batched_tokens=8, max_num_seqs=1))
        logits.append([result.of(request) for request in requests])
        steps = result.rows[0].steps
        logits[-1].append(steps)
    assert logits[0].pop() > logits[1].pop()
    assert max(far(logit, other) for logit, other in zip(*logits, strict=True)) < 1e-5

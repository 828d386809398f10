"""Full recompute and prefix caches: M0, M1, M1r."""

import pytest
import torch

from spanlab.core.admission import BatchRules

from ..support.products import in_turn
from .factories import HEAD, arm, make_request, make_small, nothing_leaks, questions, run, start, text
from .oracles import error

ORDERS = [(0, 1, 2), (0, 1), (0, 2, 1), (2, 0), (0, 1, 2)]
LENGTHS = (20, 1, 33)
RULES = {
    "one by one": BatchRules(max_num_batched_tokens=4096, max_num_seqs=1),
    "packed": BatchRules(max_num_batched_tokens=4096, max_num_seqs=4),
    "chunked": BatchRules(max_num_batched_tokens=13, max_num_seqs=4),
    "whole prompts": BatchRules(max_num_batched_tokens=13, max_num_seqs=4, enable_chunked_prefill=False),
    "prefill first": BatchRules(max_num_batched_tokens=40, max_num_seqs=3, prefill_first=True),
}


@pytest.mark.parametrize(("rules", "name"), in_turn(RULES, ("none", "block_hash_16", "radix")))
def test_logits_are_those_of_a_dense_forward(rules, name):
    requests = questions(ORDERS, LENGTHS, output=4, at=0)
    result = run(make_small(), arm(name), requests, rules=RULES[rules])
    assert error(result, *requests, blocks=False) < 1e-4
    assert nothing_leaks(result)


def test_without_reuse_nothing_is_stored_or_reused():
    requests = questions(ORDERS, LENGTHS)
    result = run(make_small(), arm("none"), requests)
    assert not result.stored
    assert all(record.reused_tokens == 0 for record in result.records.values())


def test_full_recompute_is_the_same_to_the_bit():
    requests = questions(ORDERS, LENGTHS, output=4, at=0)
    rules = BatchRules(max_num_batched_tokens=30, max_num_seqs=3)
    first, second = (run(make_small(), arm("none"), requests, rules=rules) for _ in range(2))
    assert all(torch.equal(first.of(request), second.of(request)) for request in requests)


def common(a, b) -> int:
    """Length of the longest common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize(("name", "block_size"), [("radix", 1), ("radix", 16), ("block_hash_16", 16)])
def test_reused_is_the_longest_common_prefix_in_whole_pages(name, block_size):
    requests = [*questions(ORDERS, LENGTHS), make_request(9, text(HEAD, 11), at=10**14)]
    result = run(make_small(), arm(name, block_size), requests)
    for rank, request in enumerate(requests):
        tokens = request.tokens.tolist()
        longest = max((common(tokens, earlier.tokens.tolist()) for earlier in requests[:rank]), default=0)
        assert result.records[request.id].reused_tokens == min(longest, len(tokens) - 1) // block_size * block_size
    assert sum(record.reused_tokens for record in result.records.values()) > 0


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_repeated_prompt_computes_only_for_its_last_token(block_size):
    request = make_request(0, text(HEAD, 48), output=3)
    result = start(make_small(), arm("radix", block_size), [request])
    first = result.serve([request]).of(request)
    again = result.serve([request]).of(request)
    assert result.records[0].reused_tokens == 47 // block_size * block_size
    assert torch.allclose(first, again, atol=1e-4)
    assert result.engine.outputs[0] == again.argmax(-1).tolist()

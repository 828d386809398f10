"""LegoLink-k (M5): the first tokens of every span computed twice, checked with every token standing twice."""

import pytest

from ..support.products import every_pair
from .factories import KERNELS, arm, make_small, nothing_leaks, permutations, questions, run
from .oracles import error, far, repaired, run_checked

LENGTHS = (20, 3, 33)


def lego(k: int, block_size: int, kernel: str):
    """LegoLink-k with one of the kernels."""
    return arm("lego_link_16", block_size, {"kind": "first", "k": k}, **KERNELS[kernel])


@pytest.mark.parametrize(("k", "block_size", "kernel"), every_pair((1, 4, 16), (1, 16), KERNELS))
def test_logits_are_those_of_a_prompt_with_its_tokens_twice(k, block_size, kernel):
    requests = questions([(0, 1, 2), (2, 1, 0), (1, 2)], LENGTHS, output=2)
    strategy = lego(k, block_size, kernel)
    result = run(make_small(), strategy, requests)
    for request in requests:
        again, start = [], 0
        for span in request.spans:
            if span.independent:
                again += range(start, start + min(k, len(span.tokens)))
            start += len(span.tokens)
        truth = repaired(make_small(), request, result.engine.outputs[request.id], again)
        assert far(result.of(request), truth) < 1e-4
        assert result.records[request.id].repaired_tokens == len(again)
    assert nothing_leaks(result)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("block_size", [1, 16])
def test_whole_spans_repaired_are_full_recompute(block_size, kernel):
    requests = questions(permutations(3), LENGTHS, output=2)
    result = run(make_small(), lego(33, block_size, kernel), requests)
    assert error(result, *requests, blocks=False) < 1e-4
    assert {record.repaired_tokens for record in result.records.values()} == {sum(LENGTHS)}


@pytest.mark.parametrize("kernel", ["rotate_queries", "pre_rotated"])
def test_a_span_that_begins_the_prompt_needs_no_repair(kernel):
    requests = questions([(0, 1), (1, 0)], LENGTHS, head=0, output=2)
    result = run_checked(make_small(), lego(4, 1, kernel), requests)
    assert [result.records[i].repaired_tokens for i in (0, 1)] == [3, 4]


def test_only_the_pages_that_are_written_are_copied():
    requests = questions([(0, 1), (1, 0)], (80, 48), output=6)
    result = run(make_small(), lego(4, 16, "rotate_queries"), requests[:1])
    pool, stored = result.engine.pool, len(result.stored)
    used = []
    compute = result.engine.run
    result.engine.run = lambda step, times=1: (compute(step, times), used.append(pool.shape.pages - pool.free_pages))[0]
    result.serve(requests[1:])
    head, copies, tail = 1, 2, 1
    assert max(used) == stored + head + copies + tail
    assert result.records[1].copied_tokens == 0


def test_repairing_nothing_is_not_lego_link():
    with pytest.raises(ValueError, match=r"repair\.k"):
        lego(0, 1, "rotate_queries")

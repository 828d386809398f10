"""APE (M7): spans at one place, behind the opening text, with attention to them re-weighted."""

from dataclasses import replace

import pytest
import torch

from spanlab.engine.oracle import block_mask, dense_logits

from .factories import APART, HEAD, KERNELS, arm, document, make_request, make_small, permutations, questions, run, text
from .oracles import all_ids, error, far, overlapped, run_checked, segments_of, twin_of

LENGTHS = (20, 1, 33)


def ape(heat: float = 0.9, scale: float = 0.9, block_size: int = 1, kernel: str = "rotate_queries"):
    """APE(T, S) with one of the kernels."""
    return arm("ape", block_size, temperature=heat, scale=scale, **KERNELS[kernel])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("heat", "scale"), [(0.9, 0.9), (0.7, 1.0), (1.0, 1.3), (1.0, 1.0)])
def test_logits_are_those_of_the_formula(heat, scale, kernel):
    requests = questions([(0, 1, 2), (2, 0), (1, 2, 0)], LENGTHS, output=2)
    result = run_checked(make_small(), ape(heat, scale, 16, kernel), requests)
    assert result.records[1].reused_tokens == 16 + 32


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("block_size", [1, 16])
def test_one_context_unweighted_is_full_recompute(block_size, kernel):
    requests = questions([(0,), (2,), (0,)], LENGTHS, output=2)
    result = run(make_small(), ape(1.0, 1.0, block_size, kernel), requests)
    assert error(result, *requests, blocks=False) < 1e-4


@pytest.mark.parametrize("head", [0, 11])
@pytest.mark.parametrize(("heat", "scale"), [(1.0, 1.0), (0.9, 0.9)])
def test_the_order_of_documents_changes_nothing(heat, scale, head):
    shuffled = questions(permutations(3), LENGTHS, head=head, output=2)
    requests = [replace(request, spans=(*request.spans[:-1], text(5, 7))) for request in shuffled]
    result = run_checked(make_small(), ape(heat, scale), requests)
    first = result.of(requests[0])
    assert max(far(result.of(request), first) for request in requests) < 2e-5


def test_unweighted_it_is_a_dense_forward_with_overlapping_positions():
    request = questions([(0, 1, 2)], LENGTHS, output=3)[0]
    result = run(make_small(), ape(1.0, 1.0), [request])
    ids = all_ids(request, result.engine.outputs[0])
    positions, end = [*range(11)], 11 + max(LENGTHS)
    for length in LENGTHS:
        positions += range(11, 11 + length)
    positions += range(end, end + len(ids) - len(positions))
    mask = block_mask(segments_of(request, len(ids)), head=11)
    truth = dense_logits(twin_of(make_small()), ids, mask, torch.tensor(positions))[request.num_tokens - 1 :]
    assert far(result.of(request), truth) < 1e-4
    assert far(overlapped(make_small(), request, result.engine.outputs[0], 1.0, 1.0), truth) < 1e-4


def test_a_span_behind_another_opening_is_not_found():
    requests = [
        make_request(0, text(HEAD, 8), document(0, 20), text(5, 4)),
        make_request(1, text(3, 8), document(0, 20), text(5, 4), at=APART),
    ]
    result = run_checked(make_small(), ape(), requests)
    assert result.records[1].reused_tokens == 0

"""APE (M7): spans at one place, behind the opening text, with attention to them re-weighted."""

from __future__ import annotations

import pytest
import torch

from spanlab.engine.oracle import block_mask, dense_logits

from .factories import APART, HEAD, arm, document, make_request, make_small, permutations, questions, run, text
from .oracles import all_ids, dense, far, overlapped, segments_of, twin_of, wrong

LENGTHS = (20, 1, 33)


def ape(heat: float = 0.9, scale: float = 0.9, block_size: int = 1, kernel: str = "rotate_queries"):
    """APE(T, S) with one of the kernels."""
    keys, sharing = {
        "rotate_keys": ("raw", "canonical"),
        "rotate_queries": ("local", "canonical"),
        "pre_rotated": ("local", "private"),
    }[kernel]
    return arm("ape", block_size, temperature=heat, scale=scale, keys=keys, kernel=kernel, sharing=sharing)


@pytest.mark.parametrize("kernel", ["rotate_keys", "rotate_queries", "pre_rotated"])
@pytest.mark.parametrize(("heat", "scale"), [(0.9, 0.9), (0.7, 1.0), (1.0, 1.3), (1.0, 1.0)])
def test_logits_are_those_of_the_formula(heat, scale, kernel):
    requests = questions([(0, 1, 2), (2, 0), (1, 2, 0)], LENGTHS, output=2)
    strategy = ape(heat, scale, 16, kernel)
    result = run(make_small(), strategy, requests)
    assert max(wrong(result, strategy, request) for request in requests) < 1e-4
    assert result.records[1].reused_tokens == 16 + 32


@pytest.mark.parametrize("kernel", ["rotate_keys", "rotate_queries", "pre_rotated"])
@pytest.mark.parametrize("block_size", [1, 16])
def test_one_context_unweighted_is_full_recompute(block_size, kernel):
    requests = questions([(0,), (2,), (0,)], LENGTHS, output=2)
    result = run(make_small(), ape(1.0, 1.0, block_size, kernel), requests)
    for request in requests:
        truth = dense(make_small(), request, result.engine.outputs[request.id], blocks=False)
        assert far(result.of(request), truth) < 1e-4


@pytest.mark.parametrize("head", [0, 11])
@pytest.mark.parametrize(("heat", "scale"), [(1.0, 1.0), (0.9, 0.9)])
def test_the_order_of_documents_changes_nothing(heat, scale, head):
    opening = [text(HEAD, head)] if head else []
    requests = [
        make_request(
            rank,
            *opening,
            *(document(name, LENGTHS[name]) for name in order),
            text(5, 7),
            output=2,
            at=rank * APART,
        )
        for rank, order in enumerate(permutations(3))
    ]
    result = run(make_small(), ape(heat, scale), requests)
    first = result.of(requests[0])
    assert max(far(result.of(request), first) for request in requests) < 2e-5
    assert wrong(result, ape(heat, scale), requests[-1]) < 1e-4


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


def test_weights_change_what_is_said():
    request = questions([(0, 2)], LENGTHS)[0]
    logits = [
        run(make_small(), ape(heat, scale), [request]).of(request) for heat, scale in ((1, 1), (0.9, 1), (1, 0.9))
    ]
    assert min(far(logits[0], logits[1]), far(logits[0], logits[2]), far(logits[1], logits[2])) > 0.01


def test_a_span_behind_another_opening_is_not_found():
    requests = [
        make_request(0, text(HEAD, 8), document(0, 20), text(5, 4)),
        make_request(1, text(3, 8), document(0, 20), text(5, 4), at=APART),
    ]
    result = run(make_small(), ape(), requests)
    assert result.records[1].reused_tokens == 0
    assert max(wrong(result, ape(), request) for request in requests) < 1e-4

"""Controls: old positions (M2), and repairs of the same size that choose badly (M8)."""

import pytest

from .factories import APART, arm, document, make_request, make_small, permutations, questions, run, text
from .oracles import dense, divergence, error, far, run_checked

LENGTHS = (20, 9, 33)


@pytest.mark.parametrize("block_size", [1, 16])
def test_old_positions_are_right_where_nothing_has_moved(block_size):
    requests = questions([(0, 1, 2)] * 3, LENGTHS, output=2)
    result = run(make_small(), arm("old_positions", block_size), requests)
    assert result.records[2].reused_tokens >= 32
    assert error(result, *requests, blocks=True) < 1e-4


def test_old_positions_are_worse_where_something_has():
    requests = questions(permutations(3), LENGTHS)
    model, losses = make_small(), {}
    for name in ("pic", "old_positions"):
        result = run(model, arm(name), requests)
        truths = (dense(model, request, [0], blocks=True) for request in requests[1:])
        losses[name] = [divergence(truth, result.of(r)) for truth, r in zip(truths, requests[1:], strict=True)]
    assert max(losses["pic"]) < 1e-6
    assert min(losses["old_positions"]) > 0.01


@pytest.mark.parametrize("name", ["random_16", "last_16"])
def test_controls_repair_as_many_tokens_as_lego_link(name):
    requests = questions(permutations(3), LENGTHS)
    budget, control = (run_checked(make_small(), arm(n), requests) for n in ("lego_link_16", name))
    for request in requests:
        assert control.records[request.id].repaired_tokens == budget.records[request.id].repaired_tokens == 16 + 9 + 16
    assert far(control.of(requests[3]), budget.of(requests[3])) > 0.1


@pytest.mark.parametrize("kind", ["strided", "random"])
def test_controls_repair_as_many_tokens_as_cache_blend(kind):
    requests = questions(permutations(3), LENGTHS)
    strategy = arm("strided_15", repair={"kind": kind, "ratio": 0.15, "base": "prompt"})
    budget, control = (run_checked(make_small(), each, requests) for each in (arm("cache_blend_15"), strategy))
    for request in requests:
        assert control.records[request.id].repaired_tokens == budget.records[request.id].repaired_tokens == 10


def computed_rows(forwarded: list[int], name: str) -> tuple[int, int]:
    """Rows that a warm request with shuffled documents sends through the model, and its record."""
    requests = [
        make_request(0, text(9, 11), document(0, 20), document(1, 9), document(2, 33), text(8, 7)),
        make_request(1, text(9, 11), document(2, 33), document(0, 20), document(1, 9), text(7, 6), at=APART),
    ]
    result = run(make_small(), arm(name), requests[:1])
    forwarded.clear()
    result.serve(requests[1:])
    return sum(forwarded), result.records[1].computed_tokens


@pytest.mark.parametrize(
    "name", ["radix", "pic", "pic_turned", "lego_link_16", "random_16", "last_16", "strided_15", "ape"]
)
def test_exactly_the_tokens_in_the_record_are_computed(forwarded, name):
    rows, answers = computed_rows(forwarded, name)
    assert rows == answers


def test_cache_blend_sends_all_tokens_of_spans_into_the_model(forwarded):
    rows, answers = computed_rows(forwarded, "cache_blend_15")
    assert (rows, answers) == (62 + 6, 10 + 6)

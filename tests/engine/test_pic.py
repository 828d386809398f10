"""Position-independent caching without repair (M3) is a dense forward under the block mask (M4), in any order."""

import pytest

from spanlab.core.admission import BatchRules

from ..support.products import every_pair, in_turn
from .factories import APART, HEAD, arm, document, make_request, make_small, permutations, questions, run, text
from .oracles import dense, error, far, run_checked

FORMS = {"rotate_keys": "pic_raw", "rotate_queries": "pic", "pre_rotated": "pic_turned"}
RULES = {
    "whole": BatchRules(max_num_batched_tokens=4096, max_num_seqs=4),
    "chunked": BatchRules(max_num_batched_tokens=13, max_num_seqs=4),
    "one prompt a step": BatchRules(max_num_batched_tokens=13, max_num_seqs=4, enable_chunked_prefill=False),
}


@pytest.mark.parametrize(("form", "block_size", "rules"), every_pair(FORMS, (1, 16), RULES))
def test_every_order_of_three_documents_cold_and_warm(form, block_size, rules):
    lengths = (20, 1, 33)
    requests = questions(permutations(3), lengths, output=2)
    result = run_checked(make_small(), arm(FORMS[form], block_size), requests, rules=RULES[rules])
    reused_tokens = sum(length // block_size * block_size for length in (11, *lengths))
    for request in requests:
        record = result.records[request.id]
        assert record.reused_tokens == (reused_tokens if request.id else 0)
        assert record.copied_tokens == (sum(lengths) if form == "pre_rotated" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("form", FORMS)
def test_every_order_of_four_documents_packed(form, block_size):
    requests = questions(permutations(4), (20, 7, 33, 16), output=3, at=0)
    rules = BatchRules(max_num_batched_tokens=50, max_num_seqs=6)
    run_checked(make_small(), arm(FORMS[form], block_size), requests, rules=rules)


FAMILIES = [*((family, "default") for family in ("qwen2", "qwen3", "mistral")), ("llama", "llama3"), ("llama", "yarn")]


@pytest.mark.parametrize(("family_and_rope", "form"), in_turn(FAMILIES, FORMS))
def test_every_family_and_rotation(family_and_rope, form):
    requests = questions(permutations(3)[3:], (60, 5, 93), output=2, at=0)
    run_checked(make_small(*family_and_rope), arm(FORMS[form], 16), requests, rules=RULES["chunked"])


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("form", FORMS)
def test_one_span_from_the_beginning_is_full_recompute(form, block_size):
    requests = [
        make_request(0, document(0, 40)),
        make_request(1, document(0, 40), at=APART),
        make_request(2, document(0, 48), at=2 * APART),
    ]
    result = run(make_small(), arm(FORMS[form], block_size), requests)
    assert [result.records[i].reused_tokens for i in (0, 1, 2)] == [0, 39 // block_size * block_size, 0]
    assert error(result, *requests, blocks=False) < 1e-4


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("form", FORMS)
def test_one_token_per_span(form, block_size):
    requests = questions([range(12), range(11, -1, -1)], [1] * 12, output=3)
    result = run_checked(make_small(), arm(FORMS[form], block_size), requests)
    # pages of 16 hold none of it, but a document that a prompt repeats is computed once
    assert result.records[1].reused_tokens == (12 + 11 if block_size == 1 else 1)


def test_text_between_documents_is_reused_behind_the_same_text_alone():
    def spans(first: int, second: int):
        return text(HEAD, 9), document(first, 20), text(5, 6), document(second, 33), text(6, 8), text(7, 3)

    requests = [
        make_request(0, *spans(0, 1), output=3),
        make_request(1, *spans(1, 0), at=APART),
        make_request(2, *spans(0, 1), at=2 * APART),
    ]
    result = run_checked(make_small(), arm("pic", 1), requests)
    assert result.records[1].reused_tokens == 0 + 9  # lengths differ with the order, so only the head is known
    assert result.records[2].reused_tokens == requests[2].num_tokens - 1


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("name", [*FORMS.values(), "lego_link_16"])
def test_one_page_at_two_places_in_one_forward(name, block_size):
    warm = make_request(0, text(HEAD, 3), document(0, 40), text(5, 4))
    two = [
        make_request(1, text(HEAD, 8), document(0, 40), text(6, 5), output=4, at=APART),
        make_request(2, document(1, 30), document(0, 40), text(7, 6), output=4, at=APART),
    ]
    result = run_checked(make_small(), arm(name, block_size), [warm, *two])
    assert result.records[1].admitted_s == result.records[2].admitted_s
    found = 40 // block_size * block_size
    assert all(result.records[i].reused_tokens + result.records[i].repaired_tokens >= found for i in (1, 2))


def test_equal_tails_behind_different_documents_are_not_shared():
    first = make_request(0, text(HEAD, 8), document(0, 20), text(5, 9))
    second = make_request(1, text(HEAD, 8), document(1, 20), text(5, 9), at=APART)
    result = run_checked(make_small(), arm("pic", 1), [first, second])
    assert result.records[1].reused_tokens == 8


def test_spans_change_outputs():
    request = questions([(0, 1)], (20, 33))[0]
    assert far(*(dense(make_small(), request, [0], blocks=blocks) for blocks in (True, False))) > 0.1

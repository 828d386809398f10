"""Prompts have exactly the tokens that they should, and every arm gets the same ones."""

from __future__ import annotations

import numpy as np
import pytest

from spanlab.evaluation.fresh_text import DOCUMENT_WORDS
from spanlab.pic_bench.prompts import shuffles
from spanlab.pic_bench.texts import fresh_words, one_token_words
from spanlab.pic_bench.timing import trial_of
from spanlab.queries import builtin_tokenizer

WRAPPING = 5  # <|im_start|> user \n … <|im_end|> \n
SYSTEM = 8 + WRAPPING
OPEN = 3  # <|im_start|> assistant \n


@pytest.fixture(scope="module")
def make_trial(settings):
    texts, tokenizer = one_token_words(0), builtin_tokenizer()

    def make(size: str = "xs", number: int = 0, *overrides: str):
        return trial_of(settings(*overrides), texts, tokenizer, size, number)

    return make


@pytest.mark.parametrize("size", DOCUMENT_WORDS)
def test_a_document_of_n_words_has_n_tokens_and_its_wrapping(make_trial, size: str):
    spans = make_trial(size).requests("same")[0].spans
    lengths = [(len(span.tokens), span.independent) for span in spans]
    document = (DOCUMENT_WORDS[size] + WRAPPING, True)
    assert lengths[0] == (SYSTEM, False)
    assert lengths[1:5] == [document] * 4
    assert sum(length for length, _ in lengths[5:]) == 4 + WRAPPING + OPEN
    assert not any(independent for _, independent in lengths[5:])


def test_a_document_is_the_same_tokens_wherever_it_stands(make_trial):
    trial = make_trial()
    first = [span.tokens.tobytes() for span in trial.requests("same")[0].spans[1:5]]
    for request, order in zip(trial.requests("shuffled")[1:], shuffles(0, 0, 4, 3), strict=True):
        assert [span.tokens.tobytes() for span in request.spans[1:5]] == [first[number] for number in order]


def test_both_orders_ask_the_same_questions_and_no_question_twice(make_trial):
    trial = make_trial()
    same, shuffled = (
        [np.concatenate([span.tokens for span in request.spans[5:]]).tobytes() for request in trial.requests(order)]
        for order in ("same", "shuffled")
    )
    assert same == shuffled
    assert len(set(same)) == 4


def test_shuffles_depend_on_seed_and_trial_alone_and_are_orders():
    assert shuffles(7, 2, 4, 5) == shuffles(7, 2, 4, 5)
    assert shuffles(7, 2, 4, 5)[:3] == shuffles(7, 2, 4, 3)
    assert len({str(shuffles(seed, trial, 8, 2)) for seed in range(3) for trial in range(3)}) == 9
    assert all(sorted(order) == [0, 1, 2, 3] for order in shuffles(0, 0, 4, 50))


@pytest.mark.parametrize("texts", [one_token_words(3), fresh_words(3)])
def test_no_two_documents_of_a_run_begin_alike(texts):
    firsts = [text.split()[0] for trial in range(40) for text in texts.documents(trial, 4, 10)]
    assert len(set(firsts)) == 160


@pytest.mark.parametrize("texts", [one_token_words(3), fresh_words(3)])
def test_documents_have_their_words_and_are_made_again_the_same(texts):
    for words in (1, 10, 200):
        made = texts.documents(5, 3, words)
        assert [len(text.split()) for text in made] == [words] * 3
        assert made == texts.documents(5, 3, words)


def test_a_prepared_document_stands_behind_the_system_prompt_and_before_an_open_turn(make_trial):
    trial = make_trial("sm")
    documents = [span.tokens for span in trial.requests("same")[0].spans[1:5]]
    for request, document in zip(trial.alone, documents, strict=True):
        assert [len(span.tokens) for span in request.spans] == [SYSTEM, len(document), OPEN]
        assert np.array_equal(request.spans[1].tokens, document)
        assert request.output_len == 1
    assert {request.id for request in trial.alone}.isdisjoint({request.id for request in trial.requests("same")})

"""Fresh documents are new in every trial, and the words they are made of are all different."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spanlab.evaluation import fresh_text
from spanlab.evaluation.fresh_text import DOCUMENT_WORDS, MOST_DOCUMENTS, MOST_TRIALS, fresh_documents, lorem

from spanlab.workloads.invented_words import WORDS, WordMint, invented_word


@given(st.integers(0, WORDS - 1), st.integers(0, WORDS - 1))
def test_different_numbers_are_different_words_of_one_length(one, other):
    assert (invented_word(one) == invented_word(other)) == (one == other)
    assert len(invented_word(one)) == 8


def test_words_by_hand():
    assert invented_word(0) == "babalbaq"
    assert invented_word(1) == "dabalbaq"
    assert invented_word(WORDS - 1) == "wuwutwuz"


def test_a_mint_never_repeats_itself_and_says_so_when_it_runs_low(monkeypatch):
    monkeypatch.setattr("spanlab.workloads.invented_words.WORDS", 20)
    mint = WordMint(np.random.default_rng(0))
    given_out = [mint.fresh() for _ in range(11)]
    assert len(set(given_out)) == 11
    with pytest.raises(ValueError, match=r"names=11: expected at most 10 different names"):
        mint.fresh()


@pytest.mark.parametrize("words", [1, 2, 8, 9, *DOCUMENT_WORDS.values()])
def test_documents_have_the_length_asked_for_in_sentences(words):
    for text in fresh_documents(seed=1, trial=2, count=3, words=words):
        assert len(text.split()) == words
        assert text.endswith(".")
        assert text.count(".") == -(-words // 8)


def test_the_seed_and_the_trial_decide_everything():
    assert fresh_documents(1, 2, 3, 50) == fresh_documents(1, 2, 3, 50)
    assert fresh_documents(1, 2, 4, 50)[:3] == fresh_documents(1, 2, 3, 50)
    assert not set(fresh_documents(1, 2, 3, 50)) & set(fresh_documents(2, 2, 3, 50))


def test_no_two_documents_of_any_trials_begin_with_the_same_word():
    trials = [*range(60), MOST_TRIALS - 1]
    texts = [text for trial in trials for text in fresh_documents(9, trial, MOST_DOCUMENTS, 2)]
    assert len({text.split()[0] for text in texts}) == len(texts) == 61 * MOST_DOCUMENTS


def test_trials_and_lengths_share_nothing_behind_the_first_word():
    texts = [text.lower() for trial in (0, 1) for words in (20, 21) for text in fresh_documents(3, trial, 2, words)]
    rests = [set(text.replace(".", "").split()[1:]) for text in texts]
    assert len(set().union(*rests)) == sum(map(len, rests)) == 4 * 19 + 4 * 20


def test_the_step_between_openings_visits_every_word():
    assert np.gcd(fresh_text._STEP, WORDS) == 1
    assert MOST_DOCUMENTS * MOST_TRIALS <= WORDS


def test_lorem_is_invented_words_of_its_generator():
    drawn = lorem(5, np.random.default_rng(3))
    assert drawn == [invented_word(n) for n in np.random.default_rng(3).integers(WORDS, size=5).tolist()]
    assert lorem(0, np.random.default_rng(3)) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [("trial", MOST_TRIALS), ("trial", -1), ("seed", -1), ("count", 0), ("count", MOST_DOCUMENTS + 1), ("words", 0)],
)
def test_what_would_repeat_or_be_empty_is_refused(key, value):
    name = {"count": "documents"}.get(key, key)
    with pytest.raises(ValueError, match=f"{name}={value}: expected a whole number from"):
        fresh_documents(**{"seed": 0, "trial": 0, "count": 1, "words": 5, key: value})

"""Answers are compared by whole numbers, without articles and punctuation."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanlab.analyses.answers import best_score, exact_match, normalised, stated, token_f1

texts = st.text(alphabet=string.ascii_letters + string.digits + " .,-'!?\n", max_size=40)
golds = texts.filter(normalised)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("The  Velmora,\n is\ta THING!", ["velmora", "is", "thing"]),
        ("47.", ["47"]),
        ("$47; 47% (47)", ["47", "47", "47"]),
        ("1,000,000 and 12,5", ["1000000", "and", "12", "5"]),
        ("4.5 and .5 and -5 and \u22125", ["4.5", "and", ".5", "and", "-5", "and", "-5"]),
        ("45-47, well-known", ["45", "47", "well", "known"]),
        ("5th v4.5 4.5x 1.2.3", ["5th", "v4.5", "4.5x", "1.2.3"]),
        ("wait...5", ["wait", "5"]),
        ("don't, it\u2019s snake_case", ["dont", "its", "snake", "case"]),
        ("\uff14\uff17 \u00c9t\u00e9", ["47", "été"]),
        ("A", ["a"]),
        ("the", ["the"]),
        (" ?!", []),
    ],
)
def test_normalised_tokens(text, tokens):
    assert normalised(text) == tokens


@pytest.mark.parametrize("answer", ["5", " 5.", "The 5!", "(5)"])
def test_exact_match_of_the_same_number(answer):
    assert exact_match(answer, "5") == stated(answer, "5") == 1


@pytest.mark.parametrize("answer", ["45", "54", "5th", "4.5", "5.4", ".5", "-5", "5,000", "v5", "", "5 or 6", "1 2 5"])
def test_a_number_is_never_found_inside_another_nor_among_several(answer):
    assert exact_match(answer, "5") == stated(answer, "5") == 0


def test_stated_finds_the_gold_answer_in_a_sentence():
    assert stated("The velmora weighs 47 quonts.", "47") == 1
    assert exact_match("The velmora weighs 47 quonts.", "47") == 0
    assert stated("It is 47. Yes, 47!", "47") == 1
    assert stated("In the red house of Bo", "red house") == 1
    assert stated("In the red old house", "red house") == 0
    assert stated("In 1990 at the red house", "red house") == 1


def test_f1_by_hand():
    # 2 common tokens of 3 in the answer and 4 in the gold answer: P 2/3, R 1/2, F1 = 2 · P · R / (P + R) = 4/7
    assert token_f1("red house burns", "big red house today") == pytest.approx(4 / 7)
    # a repeated token counts as often as both have it: P 1/3, R 1
    assert token_f1("red red red", "red") == pytest.approx(1 / 2)
    assert token_f1("", "red") == 0
    assert token_f1("45", "5") == 0


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_only_equal_whole_numbers_match(first, second):
    same = first == second
    assert exact_match(str(first), str(second)) == same
    assert stated(f"it weighs {first} quonts", str(second)) == same
    assert exact_match(f"1{first}", str(first)) == exact_match(f"{first}1", str(first)) == 0


@given(golds, golds)
def test_f1_is_symmetric_within_bounds_and_one_for_the_same_bag(first, second):
    assert token_f1(first, second) == token_f1(second, first)
    assert 0 <= token_f1(first, second) <= 1
    assert (token_f1(first, second) == 1) == (sorted(normalised(first)) == sorted(normalised(second)))


@given(golds, golds)
def test_an_exact_match_is_also_stated_and_has_full_f1(answer, gold):
    if exact_match(answer, gold):
        assert stated(answer, gold) == token_f1(answer, gold) == 1
    assert exact_match(gold, gold) == 1


@given(texts)
def test_normalising_twice_changes_nothing(text):
    once = normalised(text)
    assert normalised(" ".join(once)) == once


def test_the_best_of_several_golds_counts():
    assert best_score(exact_match, "the bookshop", ["library", "bookshop"]) == 1
    assert best_score(token_f1, "red house", ["house", "blue house today"]) == pytest.approx(2 / 3)


def test_a_gold_answer_that_says_nothing_is_refused():
    with pytest.raises(ValueError, match=r"gold='\?!': expected an answer with at least one letter or digit"):
        exact_match("x", "?!")
    with pytest.raises(ValueError, match=r"golds=\[\]: expected at least one gold answer"):
        best_score(token_f1, "x", [])

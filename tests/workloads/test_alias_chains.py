"""Alias chains have one answer that needs both documents, and no digits that match by chance."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.analyses.answers import best_score, exact_match, stated
from spanlab.workloads.alias import SHORTEST_DOCUMENT, AliasQuestions, alias_chains

DEFINITION = re.compile(r"The (\w+) is also called the (\w+)\.")
USAGE = re.compile(r"The (\w+) (weighs|costs|holds|needs) (\d+) (\w+)\.")
PLAIN_TEXT = """
some sleep few like rain old grow near water many follow the quiet
is also called how does weighs weigh costs cost holds hold needs need
"""
PLAIN = frozenset(PLAIN_TEXT.split())
QUESTION = re.compile(r"How many (\w+) does the (\w+) (weigh|cost|hold|need)\?")


def deduced(documents, question):
    """Every answer that follows from the documents, under a closed world with symmetric aliases."""
    text = " ".join(documents)
    unit, name, infinitive = QUESTION.fullmatch(question).groups()
    names = {name}
    for _ in documents:
        for first_name, second_name in DEFINITION.findall(text):
            if {first_name, second_name} & names:
                names |= {first_name, second_name}
    return {n for who, verb, n, of in USAGE.findall(text) if who in names and of == unit and verb == f"{infinitive}s"}


chain_lists = st.builds(
    alias_chains, st.integers(1, 3), st.integers(SHORTEST_DOCUMENT, 60), st.integers(0, 9), st.integers(0, 2**63 - 1)
)


@settings(max_examples=60, deadline=None)
@given(chain_lists)
def test_the_documents_contain_only_the_gold_answer(chains):
    for chain in chains:
        assert deduced(chain.documents, chain.question) == {chain.answer}


@settings(max_examples=60, deadline=None)
@given(chain_lists)
def test_without_the_definition_or_the_usage_there_is_no_answer(chains):
    for chain in chains:
        for needed in (chain.definition, chain.usage):
            remaining = [text for index, text in enumerate(chain.documents) if index != needed]
            assert deduced(remaining, chain.question) == set()


@settings(max_examples=60, deadline=None)
@given(chain_lists)
def test_numbers_of_a_prompt_do_not_contain_each_other(chains):
    for chain in chains:
        numbers = re.findall(r"\d+", " ".join((*chain.documents, chain.question)))
        assert numbers.count(chain.answer) == 1
        for index, number in enumerate(numbers):
            assert len(number) > 1
            assert not any(number in other for other in numbers[:index] + numbers[index + 1 :])


@settings(max_examples=40, deadline=None)
@given(chain_lists)
def test_names_are_unique_and_not_contained_in_others(chains):
    named = []
    for chain in chains:
        text = " ".join(chain.documents)
        names = [name for pair in DEFINITION.findall(text) for name in pair]
        named += {*names, *(who for who, *_ in USAGE.findall(text)), QUESTION.fullmatch(chain.question)[1]}
        for word in chain.vocabulary:
            assert not any(word in other for other in chain.vocabulary if other != word)
    assert len(named) == len(set(named))


@pytest.mark.parametrize("words", [10, 11, 12, 13, 14, 15, 50, 200, 2000])
def test_every_document_has_the_length_asked_for(words):
    for chain in alias_chains(3, words, distractors=3, seed=words):
        assert [len(text.split()) for text in chain.documents] == [words] * 5


def test_the_vocabulary_is_every_invented_word_and_nothing_else():
    for chain in alias_chains(8, 60, distractors=3, seed=1):
        vocabulary = set(re.findall(r"[a-z]+", " ".join((*chain.documents, chain.question)).lower()))
        assert vocabulary - PLAIN == set(chain.vocabulary)


def test_distractors_share_verb_and_unit_so_that_only_the_alias_decides():
    for chain in alias_chains(8, 20, distractors=4, seed=2):
        usages = USAGE.findall(" ".join(chain.documents))
        assert len(usages) == 3
        assert len({(verb, unit) for _, verb, _, unit in usages}) == 1


def test_the_places_of_the_facts_are_told_and_vary():
    chains = alias_chains(40, 10, distractors=1, seed=3)
    for chain in chains:
        assert USAGE.search(chain.documents[chain.usage])[3] == chain.answer
        asked_name = QUESTION.fullmatch(chain.question)[2]
        assert DEFINITION.search(chain.documents[chain.definition])[1] == asked_name
    orders = {(chain.definition, chain.usage) for chain in chains}
    assert orders == {(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)}


def test_the_seed_decides_everything_and_more_questions_begin_with_the_fewer():
    three, six = alias_chains(3, 30, seed=4), alias_chains(6, 30, seed=4)
    assert three == six[:3]
    assert three != alias_chains(3, 30, seed=5)


def test_only_the_gold_number_of_a_prompt_scores():
    for chain in alias_chains(10, 20, distractors=9, seed=6):
        for number in range(1000):
            assert best_score(exact_match, str(number), [chain.answer]) == (str(number) == chain.answer)
        every = " ".join(re.findall(r"\d+", " ".join(chain.documents)))
        assert stated(every, chain.answer) == 0


def test_as_many_distractors_as_there_are_numbers_still_have_one_answer():
    (chain,) = alias_chains(1, 10, distractors=178, seed=7)
    assert len(chain.documents) == 180
    assert deduced(chain.documents, chain.question) == {chain.answer}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"questions": 0}, "workload.alias_questions.questions=0: expected a whole number from 1"),
        ({"words": 9}, "workload.alias_questions.words=9: expected a whole number from 10"),
        ({"distractors": 179}, "workload.alias_questions.distractors=179: expected a whole number from 0 to 178"),
        ({"seed": -1}, "workload.alias_questions.seed=-1: expected a whole number from 0"),
    ],
)
def test_a_senseless_study_is_refused(options, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        AliasQuestions(**options)

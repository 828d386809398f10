"""Answers about synthetic facts follow from all gold passages, and from no other passages."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.workloads.tasks import Document, Facts, Question, Task, check_task, facts

KEPT = re.compile(r"(\w+) keeps the (\w+) in (\w+)\.")
LENT = re.compile(r"(\w+) lent the (\w+) to (\w+)\.")
ONE_HOP = re.compile(r"In which city does (\w+) keep the (\w+)\?")
TWO_HOPS = re.compile(r"In which city is the (\w+) that (\w+) lent\?")

options = st.builds(
    lambda halves, sentences, remarks, hops, seed: Facts(3, 2 * halves, 2 * sentences, remarks, hops, seed),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2),
    st.sampled_from([[1], [2], [1, 2]]),
    st.integers(0, 99),
)


def deduced(passages: Iterable[str], question: str) -> set[str]:
    """Every answer that follows from the passages, by matching the two kinds of sentences."""
    text = " ".join(passages)
    one_hop, two_hops = ONE_HOP.fullmatch(question), TWO_HOPS.fullmatch(question)
    if one_hop:
        keepers = {(one_hop[1], one_hop[2])}
    else:
        keepers = {
            (borrower, item) for owner, item, borrower in LENT.findall(text) if (item, owner) == two_hops.groups()
        }
    return {city for keeper, item, city in KEPT.findall(text) if (keeper, item) in keepers}


def every_question(task: Task) -> Iterator[tuple[Document, Question]]:
    return ((document, question) for document in task.documents for question in document.questions)


@given(options)
@settings(max_examples=30, deadline=None)
def test_questions_follow_from_all_their_gold_passages(facts_options):
    task = facts(facts_options)
    everything = [passage for document in task.documents for passage in document.passages]
    for document, question in every_question(task):
        gold = [document.passages[index] for index in question.gold]
        assert deduced(gold, question.text) == set(question.answers)
        assert deduced(everything, question.text) == set(question.answers)
        assert question.answers[0] in gold[0]
        for left_out in gold:
            remaining = [passage for passage in everything if passage != left_out]
            assert deduced(remaining, question.text) == set()


@given(options)
@settings(max_examples=30, deadline=None)
def test_hops_count_the_gold_passages(facts_options):
    labels = {question.label: len(set(question.gold)) for _, question in every_question(facts(facts_options))}
    assert labels == {
        name: hops for hops, name in ((1, "facts, 1 hop"), (2, "facts, 2 hops")) if hops in facts_options.hops
    }


@given(options)
@settings(max_examples=30, deadline=None)
def test_passages_hold_as_many_sentences_as_asked(facts_options):
    for document in facts(facts_options).documents:
        sentences = facts_options.sentences + facts_options.remarks
        assert {passage.count(".") for passage in document.passages} == {sentences}
        items = Counter(item for _, item, _ in KEPT.findall(" ".join(document.passages)))
        assert facts_options.hops == [1] or set(items.values()) == {2}


def test_stem_and_answer_state_the_fact():
    task = facts(Facts(1, hops=[1]))
    for document, question in every_question(task):
        assert f"{question.stem} {question.answers[0]}." in document.passages[question.gold[0]]


def test_seed_and_collections_draw_other_facts():
    first, more, other = facts(Facts(2)), facts(Facts(3)), facts(Facts(2, seed=1))
    assert more.documents[:2] == first.documents
    assert other.documents != first.documents


def test_a_thousand_questions_can_be_made():
    task = check_task(facts(Facts(collections=50)), "facts")
    questions = [question.text for _, question in every_question(task)]
    assert len(set(questions)) == len(questions) == 600


@pytest.mark.parametrize(
    ("given_options", "sentence"),
    [
        ({"hops": [3]}, r"hops=\[3\]: expected \[1\], \[2\] or \[1,2\]$"),
        (
            {"passages": 1},
            r"passages=1 with sentences=2: expected 2 passages or more and a multiple of 4 facts, for two",
        ),
        ({"passages": 3, "sentences": 3}, r"passages=3 with sentences=3: expected 2 passages or more and a multiple"),
        ({"sentences": 40}, r"sentences=40 with passages=6: expected at most 64 cities and 96 names in a collection"),
    ],
)
def test_facts_that_cannot_be_made_are_refused(given_options, sentence):
    with pytest.raises(ValueError, match=f"^workload.questions.facts.{sentence}"):
        Facts(**given_options)


def test_more_collections_than_names_are_refused():
    with pytest.raises(
        ValueError,
        match=r"^workload.questions.facts.collections=2000: expected at most \d+ with seed=0, because no name is left",
    ):
        facts(Facts(collections=2000))

"""Selection of questions, reported overlap of prompts, and rejected settings."""

from collections import Counter

import numpy as np
import pytest

from spanlab.core.protocol import novel_requests
from spanlab.workloads import WORKLOADS
from spanlab.workloads.questions import ROOM, Questions, overlap
from spanlab.workloads.tasks import Facts


def test_requests_name_their_gold_spans_and_labels(load):
    workload = load(k=2, search="document")
    assert workload.labels == {
        "task": ("mine",) * 3,
        "opening": ("",) * 3,
        "choices": ("", "day\nnight", ""),
        "gold_position": (0, 0, 0),
        "gold_tokens": (26, 25, 34),
    }
    assert [request.gold for request in workload.requests] == [(1,), (1,), (1,)]
    assert [request.answer for request in workload.requests] == ["in a den\nunderground", "night", "bread"]
    assert [request.group_id for request in workload.requests] == [0, 0, 1]
    assert [request.output_len for request in workload.requests] == [11 + ROOM, 5 + ROOM, 5 + ROOM]


def test_gold_passages_that_are_not_found_are_reported(load):
    workload = load(retrieval="given", k=1)
    assert workload.labels["gold_position"] == (0, 0, -1)
    assert [request.gold for request in workload.requests] == [(1,), (1,), ()]
    assert "all gold passages found for 67%" in workload.provenance.detail


def test_tasks_without_gold_passages_have_no_such_labels(load, write_rows):
    rows = [{"question": "Who?", "answer": "x", "passages": ["a fox", "b"]}]
    workload = load(write_rows(rows), k=2)
    assert set(workload.labels) == {"task", "opening", "choices"}
    assert workload.requests[0].gold == ()
    assert "gold" not in workload.provenance.detail


def test_overlap_counts_tokens_of_earlier_prompts(load):
    workload = load(retrieval="given", k=None)
    first, second, third = ([len(span.tokens) for span in request.spans[1:-1]] for request in workload.requests)
    assert second[:2] == first[1:]
    expected = sum(second[:2]) / sum(first + second + third)
    assert overlap(workload.requests) == pytest.approx(expected)
    assert "2 to 3 passages each by given, ranked, " in workload.provenance.detail
    assert f"{expected:.0%} of the passages' tokens stood in an earlier prompt" in workload.provenance.detail


@pytest.mark.parametrize(("requests", "counts"), [(3, [1, 1, 1]), (7, [3, 2, 2]), (24, [8, 8, 8]), (99, [8, 8, 8])])
def test_requests_are_drawn_from_all_documents_alike(load, requests, counts):
    drawn = load(task="facts", facts=Facts(collections=3, passages=4, sentences=2), requests=requests).requests
    assert sorted(Counter(request.group_id for request in drawn).values(), reverse=True) == counts


def test_selected_documents_alone_are_searched(load):
    workload = load(settings={"documents": 1}, k=4)
    assert {request.group_id for request in workload.requests} == {0}
    with pytest.raises(
        ValueError, match=r"^workload.questions.k=5: expected at most 4, the passages that can be retrieved"
    ):
        load(settings={"documents": 1}, k=5)


def test_seeds_draw_other_questions_of_the_same_facts(load):
    first, second = (load(task="facts", requests=20, seed=seed).requests for seed in (0, 1))
    assert [request.tokens.tobytes() for request in first] != [request.tokens.tobytes() for request in second]


def test_the_same_settings_make_the_same_ids(load):
    first, second = (load(task="facts", requests=20, order="shuffled").requests for _ in range(2))
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("limit", "problem"),
    [
        (25, "the passage 'The fox sleeps in a den.' has 26 tokens: expected shorter passages"),
        (150, "the prompt of question 1 has 1.. tokens: expected a smaller k or shorter passages"),
    ],
)
def test_prompts_beyond_the_limit_are_refused(load, limit, problem):
    with pytest.raises(ValueError, match=f"^workload.max_prompt_tokens={limit}: {problem}"):
        load(settings={"max_prompt_tokens": limit}, k=1)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"questions": {"task": "fact"}}, r"workload.questions.task=fact: expected .*facts"),
        ({"questions": {"task": "local"}}, r"workload.path=null with workload.questions.task=local: expected a file"),
        (
            {"path": "x", "questions": {"task": "facts"}},
            r"workload.path=x with workload.questions.task=facts: expected null",
        ),
        (
            {"questions": {"passage_words": 9}},
            r"workload.questions.passage_words=9 with workload.questions.task=facts: expected",
        ),
        (
            {"path": "x", "questions": {"task": "local", "facts": {"collections": 2}}},
            "workload.questions.facts with workload.questions.task",
        ),
        ({"questions": {"k": 0}}, r"workload.questions.k=0: expected a number above zero"),
        ({"questions": {"order": "random"}}, r"workload.questions.order=random: expected"),
        ({"questions": {}, "question_position": "before"}, r"workload.question_position=before with workload.kind="),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        WORKLOADS.of("workload", {"kind": "questions", **settings})


def test_questions_are_not_dropped_for_their_length():
    with pytest.raises(
        ValueError, match=r"^workload.too_long=drop with workload.kind=questions: expected workload.too_long=cut"
    ):
        WORKLOADS.of("workload", {"kind": "questions", "too_long": "drop"})


def test_novel_questions_share_no_passage(load):
    facts = Facts(collections=6, passages=4, sentences=2)
    workload = load(task="facts", facts=facts, requests=9, novel=2, search="document", k=2)
    groups = Counter(request.group_id for request in workload.requests)
    assert sorted(groups.values()) == [1, 1, 2, 2, 2, 3]
    alone = {request.id for request in workload.requests if groups[request.group_id] == 1}
    assert alone <= novel_requests(workload.requests)


def test_novel_questions_need_documents_of_their_own(load):
    with pytest.raises(ValueError, match=r"^workload\.questions\.novel=2 with workload\.questions\.search=corpus: "):
        Questions(novel=2)
    with pytest.raises(ValueError, match=r"^workload\.questions\.novel=3: expected fewer than 3, the documents served"):
        load(task="facts", facts=Facts(collections=3), novel=3, search="document", k=2)

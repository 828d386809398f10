"""Question files of each task are parsed, and invalid files raise an error of one sentence."""

import csv
import re
from pathlib import Path

import pytest

from spanlab.workloads.tasks import Document, Question, Task, articles, check_task, fairytaleqa, questions, stories

from ...support.files import write_lines

STORY = {
    "doc_id": "fox",
    "story": "The fox left.\nIt rained.\n\nIt came home.\n\nIt slept.",
    "n_sections": 3,
    "questions": [
        {"question": "Who left?", "answers": ["the fox", "the  fox", "a fox"], "section": "1"},
        {"question": "What then?", "answers": ["it came home"], "section": "2, 3"},
    ],
}


def table(path: Path, *rows: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_fairytaleqa_has_sections_as_passages(tmp_path):
    hidden = STORY | {"doc_id": "owl", "story": STORY["story"] + "\n\nA song."}
    task = fairytaleqa(write_lines(tmp_path / "tales.jsonl", STORY, hidden))
    (story,) = task.documents
    assert task.left_out == 1
    assert story.passages == ("The fox left.\nIt rained.", "It came home.", "It slept.")
    assert [(question.answers, question.gold) for question in story.questions] == [
        (("the fox", "a fox"), (0,)),
        (("it came home",), (1, 2)),
    ]


def test_fairytaleqa_as_published_keeps_blank_lines(tmp_path):
    sections = [{"section": "1", "text": "The fox left.\n\nIt rained."}, {"section": "2", "text": "It slept."}]
    entry = {"question": "Who left?", "cor_section": "1", "answer1": "the fox", "answer2": "", "answer4": "a fox"}
    for origin in ("by-origin", "by-split"):
        table(tmp_path / origin / "section-stories" / "all" / "fox-story.csv", *sections)
        table(tmp_path / origin / "questions" / "train" / "fox-questions.csv", entry)
    (story,) = fairytaleqa(tmp_path).documents
    assert story.passages == ("The fox left.\n\nIt rained.", "It slept.")
    assert story.questions == (Question("Who left?", ("the fox", "a fox"), gold=(0,)),)


def test_quality_keeps_its_options(tmp_path):
    entry = {"question": "Why?", "options": ["so", "or  so"], "gold_label": 2}
    text = "One two three. Four five six. Seven."
    task = articles(write_lines(tmp_path / "q.jsonl", {"article_id": 1, "article": text, "questions": [entry]}), 4)
    (article,) = task.documents
    assert article.passages == ("One two three.", "Four five six. Seven.")
    assert article.questions == (Question("Why?", ("or so",), ("so", "or so")),)


def test_squality_has_answers_one_a_line(tmp_path):
    entry = {"question_text": "Plot?", "responses": [{"response_text": "a\nb"}, {"response_text": "c"}]}
    (story,) = stories(write_lines(tmp_path / "s.jsonl", {"document": "One. Two.", "questions": [entry]})).documents
    assert story.questions[0].answers == ("a b", "c")


def test_local_rows_of_a_document_belong_together(write_rows):
    wood, town = questions(write_rows()).documents
    assert len(wood.passages) == 4
    assert [question.ranking for question in wood.questions] == [(0, 1, 2), (1, 2, 3)]
    assert [question.gold for question in (*wood.questions, *town.questions)] == [(0,), (1,), (1,)]
    assert wood.questions[1].choices == ("day", "night")


def test_local_rows_with_equal_passages_belong_together(write_rows):
    row = {"question": "Who?", "answer": "x", "passages": ["a", "b"]}
    documents = questions(write_rows([row, row | {"passages": ["b"]}, row | {"question": "Why?"}])).documents
    assert [len(document.questions) for document in documents] == [2, 1]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"question": None}, "line 1 has no field 'question'"),
        ({"answer": 3}, "line 1 has answer=3, not a list"),
        ({"passages": "text"}, 'line 1 has passages="text", not a list'),
        ({"passages": ["a", 1]}, "line 1 has 1 in passages, not a string"),
        ({"gold": 7}, "has gold=7 with 3 passages; expected their numbers from 0"),
        ({"gold": []}, r"line 1 has gold=\[\]; expected at least one number of a passage"),
        ({"gold": None}, "has gold in some rows only; expected it in every row or none"),
        ({"options": ["day", "night"]}, "has the answer 'in a den'; expected one of its options"),
        ({"passage": "a"}, "line 1 has the unknown field 'passage'; expected JSON lines with question, answer"),
    ],
)
def test_rows_of_another_form_are_refused(write_rows, change, problem):
    with pytest.raises(ValueError, match=problem):
        questions(write_rows(**change))


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (Document("d", (), (Question("?", ("a",)),)), "has the document 'd' without any passage"),
        (Document("d", ("a", " "), (Question("?", ("a",)),)), "has the document 'd' with an empty passage, number 1"),
        (
            Document("d", ("a",), (Question("Why?", ()),)),
            "has the document 'd' with a question without a gold answer, 'Why?'; expected one",
        ),
        (Document("d", ("a",), ()), "holds no question; expected at least one"),
    ],
)
def test_tasks_without_texts_or_answers_are_refused(document, problem):
    with pytest.raises(ValueError, match=f"^FILE {re.escape(problem)}"):
        check_task(Task("t", "local text", "documents", "Be brief.", (document,)), "FILE")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"questions": [{"question": "?", "answers": ["a"], "section": "9"}]}, "has a question about section '9' of 3"),
        ({"n_sections": 4}, "has no story with recognisable sections"),
        ({"story": None}, "line 1 has story=null, not a string"),
        ({"questions": [1]}, "line 1 has 1 in questions, not an object"),
        ({"questions": [{"question": "?", "section": "1", "answers": [1]}]}, "line 1 has 1 in answers, not a string"),
    ],
)
def test_fairytales_of_another_form_are_refused(tmp_path, change, problem):
    with pytest.raises(ValueError, match=problem):
        fairytaleqa(write_lines(tmp_path / "tales.jsonl", STORY | change))

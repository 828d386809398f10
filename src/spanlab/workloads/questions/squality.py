"""SQuALITY: stories cut into passages, with questions that are answered in a paragraph (arXiv 2205.11465)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spanlab.workloads import prompts
from spanlab.workloads.files import field, read_jsonl
from spanlab.workloads.passages import cut
from spanlab.workloads.questions.task import TASKS, Document, Question, Task, distinct

KEY = "workload.path"
EXPECTED = "a SQuALITY jsonl with document and questions[{question_text, responses[{response_text}]}]"
_INSTRUCTION = "Answer the question about the story from the passages, in one paragraph."


@TASKS.register("squality")
def stories(path: Path, passage_words: int = prompts.RAG.passage_words) -> Task:
    """Stories of a SQuALITY jsonl in passages of whole sentences; which of them hold an answer is not known."""
    rows = read_jsonl(path, KEY, EXPECTED)
    documents = tuple(_document(f"story {number}", row, path, passage_words) for number, row in enumerate(rows))
    return Task("squality", "local text", f"SQuALITY stories, {path.name}", _INSTRUCTION, documents)


def _document(name: str, row: dict[str, Any], path: Path, words: int) -> Document:
    passages = cut(field(row, "document", path, KEY, EXPECTED, str), words)
    asked = field(row, "questions", path, KEY, EXPECTED, list)
    return Document(name, tuple(passages), tuple(_question(one, path) for one in asked))


def _question(row: dict[str, Any], path: Path) -> Question:
    responses = field(row, "responses", path, KEY, EXPECTED, list)
    answers = [field(one, "response_text", path, KEY, EXPECTED, str) for one in responses]
    return Question(field(row, "question_text", path, KEY, EXPECTED, str).strip(), distinct(answers))

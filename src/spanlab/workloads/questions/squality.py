"""SQuALITY: stories split into passages, with questions and answers of a paragraph (arXiv 2205.11465)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spanlab.workloads import prompts
from spanlab.workloads.files import JsonRow, field, location, read_jsonl
from spanlab.workloads.passages import split_passages
from spanlab.workloads.questions.task import TASKS, Document, Question, Task, distinct

KEY = "workload.path"
EXPECTED = "a SQuALITY jsonl with document and questions[{question_text, responses[{response_text}]}]"
_INSTRUCTION = "Answer the question about the story from the passages, in one paragraph."


@TASKS.register("squality")
def stories(path: Path, passage_words: int = prompts.RAG.passage_words) -> Task:
    """Read the stories of a SQuALITY jsonl as passages of complete sentences; gold passages are unknown."""
    rows = read_jsonl(path, KEY, EXPECTED)
    documents = tuple(_document(f"story {number}", row, path, passage_words) for number, row in enumerate(rows))
    return Task("squality", "local text", f"SQuALITY stories, {path.name}", _INSTRUCTION, documents)


def _document(name: str, row: JsonRow, path: Path, passage_words: int) -> Document:
    passages = split_passages(field(row, "document", path, KEY, EXPECTED, str), passage_words)
    entries = field(row, "questions", path, KEY, EXPECTED, list)
    return Document(name, tuple(passages), tuple(_question(entry, location(row, path)) for entry in entries))


def _question(row: Any, path: str) -> Question:
    responses = field(row, "responses", path, KEY, EXPECTED, list)
    answers = [field(response, "response_text", path, KEY, EXPECTED, str) for response in responses]
    return Question(field(row, "question_text", path, KEY, EXPECTED, str).strip(), distinct(answers))

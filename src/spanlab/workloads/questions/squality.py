"""SQuALITY: stories split into passages, with questions and answers of a paragraph (arXiv 2205.11465)."""

from __future__ import annotations

from pathlib import Path

from spanlab.workloads import prompts
from spanlab.workloads.files import JsonRow, read_jsonl
from spanlab.workloads.passages import split_passages
from spanlab.workloads.questions.task import TASKS, Document, Question, Task, distinct

KEY = "workload.path"
EXPECTED = "a SQuALITY jsonl with document and questions[{question_text, responses[{response_text}]}]"
_INSTRUCTION = "Answer the question about the story from the passages, in one paragraph."


@TASKS.register("squality")
def stories(path: Path, passage_words: int = prompts.RAG.passage_words) -> Task:
    """Read the stories of a SQuALITY jsonl as passages of complete sentences; gold passages are unknown."""
    rows = read_jsonl(path, KEY, EXPECTED)
    documents = tuple(_document(f"story {number}", row, passage_words) for number, row in enumerate(rows))
    return Task("squality", "local text", f"SQuALITY stories, {path.name}", _INSTRUCTION, documents)


def _document(name: str, row: JsonRow, passage_words: int) -> Document:
    passages = split_passages(row.field("document", str), passage_words)
    return Document(name, tuple(passages), tuple(map(_question, row.rows("questions"))))


def _question(row: JsonRow) -> Question:
    answers = [response.field("response_text", str) for response in row.rows("responses")]
    return Question(row.field("question_text", str).strip(), distinct(answers))

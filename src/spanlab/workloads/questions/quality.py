"""QuALITY: articles cut into passages, with multiple-choice questions whose options stay (arXiv 2112.08608)."""

from __future__ import annotations

from pathlib import Path

from spanlab.workloads import prompts, quality
from spanlab.workloads.files import read_jsonl
from spanlab.workloads.passages import cut
from spanlab.workloads.prompts import option_line
from spanlab.workloads.questions.task import TASKS, Document, Question, Task, one_line

_INSTRUCTION = "Answer the question about the article from the passages. Reply with the text of the right option alone."


@TASKS.register("quality")
def articles(path: Path, passage_words: int = prompts.RAG.passage_words) -> Task:
    """Articles of a QuALITY jsonl in passages of whole sentences; which of them hold an answer is not known."""
    rows = read_jsonl(path, quality.KEY, quality.EXPECTED)
    found = enumerate(quality.articles(rows, path))
    documents = tuple(_document(f"article {number}", article, passage_words) for number, article in found)
    return Task("quality", "local text", f"QuALITY articles, {path.name}", _INSTRUCTION, documents)


def _document(name: str, article: prompts.Document, words: int) -> Document:
    assert isinstance(article.body, str), "only text can be cut"
    return Document(name, tuple(cut(article.body, words)), tuple(map(_question, article.questions)))


def _question(asked: prompts.Question) -> Question:
    right = (option for at, option in enumerate(asked.options) if option_line(at, option) in asked.answers)
    return Question(asked.text, tuple(map(one_line, right)), tuple(map(one_line, asked.options)))

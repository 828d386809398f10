"""QuALITY: articles split into passages, with multiple-choice questions and their options (arXiv 2112.08608)."""

from __future__ import annotations

from pathlib import Path

from spanlab.workloads import prompts, quality
from spanlab.workloads.files import read_jsonl
from spanlab.workloads.passages import split_passages
from spanlab.workloads.prompts import option_line
from spanlab.workloads.questions.task import TASKS, Document, Question, Task, one_line

_INSTRUCTION = "Answer the question about the article from the passages. Reply with the text of the right option alone."


@TASKS.register("quality")
def articles(path: Path, passage_words: int = prompts.RAG.passage_words) -> Task:
    """Read the articles of a QuALITY jsonl as passages of complete sentences; gold passages are unknown."""
    rows = read_jsonl(path, quality.KEY, quality.EXPECTED)
    numbered = enumerate(quality.articles(rows))
    documents = tuple(_document(f"article {number}", article, passage_words) for number, article in numbered)
    return Task("quality", "local text", f"QuALITY articles, {path.name}", _INSTRUCTION, documents)


def _document(name: str, article: prompts.Document, passage_words: int) -> Document:
    assert isinstance(article.body, str), "only text can be split"
    return Document(name, tuple(split_passages(article.body, passage_words)), tuple(map(_question, article.questions)))


def _question(question: prompts.Question) -> Question:
    right = (option for index, option in enumerate(question.options) if option_line(index, option) in question.answers)
    return Question(question.text, tuple(map(one_line, right)), tuple(map(one_line, question.options)))

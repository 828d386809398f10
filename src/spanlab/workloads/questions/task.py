"""Task: documents split into passages, and questions about them with known answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from spanlab.registry import Registry
from spanlab.workloads.workload import ProvenanceKind


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a document.

    `answers`  gold references, equally correct; at least one.
    `choices`  the options of a multiple-choice question, which include the answer; empty for an open question.
    `gold`     numbers of the document's passages that the answer needs, the one that states it first; None if unknown.
    `stem`     start of the answer in the prompt; the gold answer continues it after a space.
    `ranking`  numbers of the passages that a file lists for this question, best first; None if it lists none.
    `label`    group of questions for reports; empty: all questions of the task.
    """

    text: str
    answers: tuple[str, ...]
    choices: tuple[str, ...] = ()
    gold: tuple[int, ...] | None = None
    stem: str = ""
    ranking: tuple[int, ...] | None = None
    label: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """A text in passages, and the questions about it."""

    name: str
    passages: tuple[str, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """Documents with questions.

    `name`          name in tables and figures.
    `nouns`         plural noun for its documents, such as FairytaleQA stories.
    `instruction`   instruction to the model.
    `left_out`      number of documents of the source that the task cannot use.
    """

    name: str
    kind: ProvenanceKind
    nouns: str
    instruction: str
    documents: tuple[Document, ...]
    left_out: int = 0


#: Functions that make a task; those with the parameter `path` read it from `workload.path`.
TASKS: Registry[Task] = Registry("workload.questions.task", given=("path",))

Item = TypeVar("Item")


def check_task(task: Task, source: str) -> Task:
    """Return the task; ValueError for an empty passage, or a document without passages, or a question without answers.

    `source`  setting that names the source of the task, the start of error messages
    """
    for document in task.documents:
        subject = f"{source} has the document {document.name!r}"
        if not document.passages:
            raise ValueError(f"{subject} without any passage; expected at least one")
        empty = _first(index for index, passage in enumerate(document.passages) if not passage.strip())
        if empty is not None:
            raise ValueError(f"{subject} with an empty passage, number {empty}; expected text in each")
        unknown = _first(question.text for question in document.questions if not any(map(str.strip, question.answers)))
        if unknown is not None:
            raise ValueError(
                f"{subject} with a question without a gold answer, {unknown[:60]!r}; expected one for each"
            )
    if not any(document.questions for document in task.documents):
        raise ValueError(f"{source} holds no question; expected at least one")
    return task


def one_line(text: str) -> str:
    """Return the text with all white space as single spaces, for lists with one text per line."""
    return " ".join(text.split())


def distinct(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the distinct non-empty texts as single lines, in order of first appearance."""
    return tuple(dict.fromkeys(line for line in map(one_line, texts) if line))


def _first(items: Iterable[Item]) -> Item | None:
    return next(iter(items), None)

"""What a task is: documents cut into passages, and questions about them whose answers are known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from spanlab.registry import Registry
from spanlab.workloads.workload import ProvenanceKind


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a document.

    `answers`  gold references, each as good as the others; at least one.
    `choices`  what may be answered, where the task has options; one of them is the answer.
    `gold`     numbers of the document's passages that hold what the answer needs, first the one that states it; None
               where the task does not know them.
    `stem`     words with which the answer is opened; the gold answer continues them behind a space.
    `ranking`  numbers of passages that a file names for this question, best first; None where it names none.
    `label`    the questions that it is reported with; empty: all of the task.
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
    """A text in passages, and what is asked about it."""

    name: str
    passages: tuple[str, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """Documents with questions.

    `name`          in tables and figures.
    `nouns`         what its documents are, such as FairytaleQA stories.
    `instruction`   what the model is told to do.
    `left_out`      documents that the source holds and the task cannot use.
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


def checked(task: Task, source: str) -> Task:
    """The task; ValueError, one sentence, for an empty passage, a document without any, or a question without answers.

    `source`  the setting that names where the task comes from, as error messages begin
    """
    for document in task.documents:
        where = f"{source} has the document {document.name!r}"
        if not document.passages:
            raise ValueError(f"{where} without any passage; expected at least one")
        empty = _first(at for at, passage in enumerate(document.passages) if not passage.strip())
        if empty is not None:
            raise ValueError(f"{where} with an empty passage, number {empty}; expected text in each")
        unknown = _first(one.text for one in document.questions if not any(map(str.strip, one.answers)))
        if unknown is not None:
            raise ValueError(f"{where} with a question without a gold answer, {unknown[:60]!r}; expected one for each")
    if not any(document.questions for document in task.documents):
        raise ValueError(f"{source} holds no question; expected at least one")
    return task


def one_line(text: str) -> str:
    """The text with all white space as single spaces, so that several can stand one a line."""
    return " ".join(text.split())


def distinct(texts: Sequence[str]) -> tuple[str, ...]:
    """Each text once, in order of first appearance, as single lines and without empty ones."""
    return tuple(dict.fromkeys(line for line in map(one_line, texts) if line))


def _first(found: Iterable[Item]) -> Item | None:
    return next(iter(found), None)

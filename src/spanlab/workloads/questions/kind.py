"""The workload `questions`: questions with known answers, over passages from a retriever."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spanlab.checks import not_negative, one_of, positive
from spanlab.workloads.queries import tokenizer_of
from spanlab.workloads.questions.facts import Facts
from spanlab.workloads.questions.passage_retrieval import SEARCHES, retrieve_passages
from spanlab.workloads.questions.prompt import PromptWriter
from spanlab.workloads.questions.question_selection import select_questions
from spanlab.workloads.questions.requests import make_workload
from spanlab.workloads.questions.retrievers import RETRIEVERS
from spanlab.workloads.questions.task import TASKS, Task, check_task
from spanlab.workloads.retrieval import ORDERS
from spanlab.workloads.selection import Selection
from spanlab.workloads.source import workload
from spanlab.workloads.workload import Workload

_KEY = "workload.questions"


@dataclass
class Questions:
    """Questions with known answers, and the passages that a retriever returns for each.

    `task`           facts (synthetic), or the content of `workload.path`: fairytaleqa, quality, squality, local; null:
                     local if a path is set, else facts
    `retrieval`      bm25; dense, by embeddings; given: as the file lists them, or gold passages, then others at random
    `search`         scope of the search: corpus, all served documents; document, the question's document
    `k`              passages of each prompt, or all if there are fewer; null: all of them
    `order`          order of passages in a prompt: ranked, best first; shuffled for each prompt; fixed, by corpus
    `requests`       most questions, drawn evenly from all documents; null: all selected ones
    `novel`          additional questions, one about each of the last documents, whose passages no other has; null: 0
    `passage_words`  most words of a passage; quality and squality only; null: 200
    `system`         whether the instruction is a system message; else it opens the user message
    `facts`          options of task=facts
    `seed`           seed of the draws
    """

    task: str | None = None
    retrieval: str = "bm25"
    search: str = "corpus"
    k: int | None = 4
    order: str = "ranked"
    requests: int | None = None
    novel: int | None = None
    passage_words: int | None = None
    system: bool = True
    facts: Facts = field(default_factory=Facts)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.task is not None:
            one_of(f"{_KEY}.task", self.task, TASKS)
        one_of(f"{_KEY}.retrieval", self.retrieval, RETRIEVERS)
        one_of(f"{_KEY}.search", self.search, SEARCHES)
        one_of(f"{_KEY}.order", self.order, ORDERS)
        for key in ("k", "requests", "novel", "passage_words"):
            positive(f"{_KEY}.{key}", getattr(self, key))
        not_negative(f"{_KEY}.seed", self.seed)
        if self.novel is not None and self.search != "document":
            setting = f"{_KEY}.novel={self.novel} with {_KEY}.search={self.search}"
            raise ValueError(f"{setting}: expected document, because the corpus includes passages of other questions")
        if self.order == "fixed" and self.k is None:
            raise ValueError(f"{_KEY}.order=fixed with {_KEY}.k=null: expected ranked or shuffled, or a number")

    def check(self, path: str | None) -> None:
        """Reject a file that the task does not read, a task without its file, and options of other tasks."""
        task = self.task_of(path)
        if TASKS.takes(task, "path") != (path is not None):
            expected = "a file or folder" if path is None else "null, because its facts are synthetic"
            raise ValueError(
                f"workload.path={path} with {_KEY}.task={task}: expected {expected}".replace("None", "null")
            )
        TASKS.check(_KEY, task, self.keys, {}, f"task={task}")

    def task_of(self, path: object) -> str:
        """Return the name of the task with or without a path."""
        return self.task or ("facts" if path is None else "local")

    @property
    def keys(self) -> dict[str, Any]:
        """Task options with values other than the default."""
        return {"passage_words": self.passage_words, "facts": None if self.facts == Facts() else self.facts}


@workload("questions", "modelled")
def modelled(questions: Questions, selection: Selection, tokenizer: str | Path | None = None) -> Workload:
    """Return questions about synthetic facts; `tokenizer` None is the built-in tokenizer."""
    return _workload(questions, TASKS.make(questions.task_of(None), questions.keys, {}), selection, tokenizer)


@workload("questions", "local")
def local(path: Path, questions: Questions, selection: Selection, tokenizer: str | Path | None = None) -> Workload:
    """Return the questions of a file or folder."""
    task = TASKS.make(questions.task_of(path), questions.keys, {}, path=path)
    return _workload(questions, check_task(task, f"workload.path={path}"), selection, tokenizer)


def _workload(options: Questions, task: Task, selection: Selection, tokenizer: str | Path | None) -> Workload:
    """Select documents and questions, then retrieve passages from the selected documents only."""
    if selection.too_long != "cut":
        raise ValueError(
            f"workload.too_long={selection.too_long} with workload.kind=questions: expected cut, because no passage is "
            "shortened and no question is left out"
        )
    chosen = select_questions(task, selection, options.requests, options.seed, options.novel)
    retrieved = retrieve_passages(chosen, options)
    writer = PromptWriter(tokenizer_of(tokenizer), task.instruction, options.system)
    return make_workload(task, retrieved, writer, selection, f"by {options.retrieval}, {options.order}")

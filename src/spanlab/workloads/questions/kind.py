"""The workload `questions`: questions whose answers are known, over passages that a retriever found."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spanlab.checks import not_negative, one_of, positive
from spanlab.workloads.queries import tokenizer_of
from spanlab.workloads.questions.asked import asked
from spanlab.workloads.questions.facts import Facts
from spanlab.workloads.questions.found import SEARCHES, found_passages
from spanlab.workloads.questions.prompt import PromptWriter
from spanlab.workloads.questions.requests import workload_of
from spanlab.workloads.questions.retrievers import RETRIEVERS
from spanlab.workloads.questions.task import TASKS, Task, checked
from spanlab.workloads.retrieval import ORDERS
from spanlab.workloads.selection import Selection
from spanlab.workloads.source import workload
from spanlab.workloads.workload import Workload

_KEY = "workload.questions"


@dataclass
class Questions:
    """Questions with known answers, and the passages that a retriever finds for each.

    `task`           facts (made up), or what `workload.path` holds: fairytaleqa, quality, squality, local; null: local
                     where there is a path, else facts
    `retrieval`      bm25; dense, by embeddings; given: by the file, or the gold passages and others drawn at random
    `search`         where passages are searched: in the corpus of all documents served, or in the question's document
    `k`              passages of each prompt, or as many as there are; null: all of them
    `order`          of passages in a prompt: ranked, best first; shuffled anew for each; fixed, as in the corpus
    `requests`       most questions to ask, drawn from all documents alike; null: all that are selected
    `novel`          further questions, one about each of the last documents, whose passages no other has; null: 0
    `passage_words`  most words of a passage; quality and squality only; null: 200
    `system`         whether the instruction is a system message; else it opens the user's
    `facts`          options of task=facts
    `seed`           of the draws
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
            told = f"{_KEY}.novel={self.novel} with {_KEY}.search={self.search}"
            raise ValueError(f"{told}: expected document, for the corpus has passages of other questions")
        if self.order == "fixed" and self.k is None:
            raise ValueError(f"{_KEY}.order=fixed with {_KEY}.k=null: expected ranked or shuffled, or a number")

    def check(self, path: str | None) -> None:
        """Refuse a file that the task does not read, a task without its file, and options of other tasks."""
        task = self.task_of(path)
        if TASKS.takes(task, "path") != (path is not None):
            expected = "a file or folder" if path is None else "null, for its facts are made up"
            raise ValueError(
                f"workload.path={path} with {_KEY}.task={task}: expected {expected}".replace("None", "null")
            )
        TASKS.check(_KEY, task, self.keys, {}, f"task={task}")

    def task_of(self, path: object) -> str:
        """The task's name, with a path or without."""
        return self.task or ("facts" if path is None else "local")

    @property
    def keys(self) -> dict[str, Any]:
        """Options of tasks that are set to anything of their own."""
        return {"passage_words": self.passage_words, "facts": None if self.facts == Facts() else self.facts}


@workload("questions", "modelled")
def modelled(questions: Questions, selection: Selection, tokenizer: str | Path | None = None) -> Workload:
    """Questions about made-up facts; `tokenizer` None is the built-in one."""
    return _workload(questions, TASKS.make(questions.task_of(None), questions.keys, {}), selection, tokenizer)


@workload("questions", "local")
def local(path: Path, questions: Questions, selection: Selection, tokenizer: str | Path | None = None) -> Workload:
    """Questions of a file or folder."""
    task = TASKS.make(questions.task_of(path), questions.keys, {}, path=path)
    return _workload(questions, checked(task, f"workload.path={path}"), selection, tokenizer)


def _workload(options: Questions, task: Task, selection: Selection, tokenizer: str | Path | None) -> Workload:
    """Retrieval searches the selected documents only, so they are selected before it."""
    if selection.too_long != "cut":
        raise ValueError(
            f"workload.too_long={selection.too_long} with workload.kind=questions: expected cut, for no passage is "
            "shortened and no question left out"
        )
    chosen = asked(task, selection, options.requests, options.seed, options.novel)
    found = found_passages(chosen, options)
    writer = PromptWriter(tokenizer_of(tokenizer), task.instruction, options.system)
    return workload_of(task, found, writer, selection, f"by {options.retrieval}, {options.order}")

"""Selection of the questions of a task, spread evenly over the selected documents."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from spanlab.workloads.questions.task import Document, Task
from spanlab.workloads.selection import Selection, check_documents


def select_questions(
    task: Task, selection: Selection, requests: int | None, seed: int, novel: int | None = None
) -> tuple[Document, ...]:
    """Select the first questions of the first documents; of those, draw at most `requests` by the seed.

    The draw is round-robin over documents, so each gets the same number while it has questions left. Documents without
    questions are left out. The last `novel` documents have one question each, which `requests` does not count.
    """
    with_questions = [document for document in task.documents if document.questions]
    check_documents(selection, len(with_questions), task.name)
    chosen = [
        replace(document, questions=document.questions[: selection.questions_per_document])
        for document in with_questions[: selection.documents]
    ]
    regular, novel_documents = chosen[: len(chosen) - (novel or 0)], chosen[len(chosen) - (novel or 0) :]
    if not regular:
        raise ValueError(f"workload.questions.novel={novel}: expected fewer than {len(chosen)}, the documents served")
    regular = regular if requests is None else _draw_questions(regular, requests, seed)
    return *regular, *(replace(document, questions=document.questions[:1]) for document in novel_documents)


def _draw_questions(documents: list[Document], requests: int, seed: int) -> list[Document]:
    rng = np.random.default_rng([seed, 0])
    slots = [
        (round_number, index)
        for index, document in enumerate(documents)
        for round_number in range(len(document.questions))
    ]
    indexes = [index for _, index in sorted(slots)[:requests]]
    counts = np.bincount(indexes, minlength=len(documents)).tolist()
    selected = []
    for document, count in zip(documents, counts, strict=True):
        numbers = np.sort(rng.permutation(len(document.questions))[:count])
        selected.append(replace(document, questions=tuple(document.questions[index] for index in numbers)))
    return [document for document in selected if document.questions]

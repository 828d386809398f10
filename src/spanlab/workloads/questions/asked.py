"""Which questions of a task are asked: the selected documents', as evenly as they have them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from spanlab.workloads.questions.task import Document, Task
from spanlab.workloads.selection import Selection, check_documents


def asked(
    task: Task, selection: Selection, requests: int | None, seed: int, novel: int | None = None
) -> tuple[Document, ...]:
    """The first documents with their first questions, as selected; of those, at most `requests`, drawn by the seed.

    The draw goes round the documents, so that each has equally many as far as its questions last. Documents without a
    question are left out. The last `novel` documents have one question each, which `requests` does not count.
    """
    with_questions = [document for document in task.documents if document.questions]
    check_documents(selection, len(with_questions), task.name)
    chosen = [
        replace(document, questions=document.questions[: selection.questions_per_document])
        for document in with_questions[: selection.documents]
    ]
    known, last = chosen[: len(chosen) - (novel or 0)], chosen[len(chosen) - (novel or 0) :]
    if not known:
        raise ValueError(f"workload.questions.novel={novel}: expected fewer than {len(chosen)}, the documents served")
    known = known if requests is None else _drawn(known, requests, seed)
    return *known, *(replace(document, questions=document.questions[:1]) for document in last)


def _drawn(documents: list[Document], requests: int, seed: int) -> list[Document]:
    draw = np.random.default_rng([seed, 0])
    turns = [(turn, at) for at, one in enumerate(documents) for turn in range(len(one.questions))]
    taken = [at for _, at in sorted(turns)[:requests]]
    counts = np.bincount(taken, minlength=len(documents)).tolist()
    found = []
    for document, count in zip(documents, counts, strict=True):
        numbers = np.sort(draw.permutation(len(document.questions))[:count])
        found.append(replace(document, questions=tuple(document.questions[at] for at in numbers)))
    return [document for document in found if document.questions]

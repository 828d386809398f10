"""Retrievers: which passages a question gets, best first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spanlab.registry import Registry

Ints = NDArray[np.int64]
Floats = NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Query:
    """A question as a retriever gets it; numbers count the passages that are searched.

    `gold`, `ranking`  as of a task's question; None where they are not known.
    """

    text: str
    gold: tuple[int, ...] | None = None
    ranking: tuple[int, ...] | None = None


#: Functions of passages and queries that return, for each query, numbers of passages, best first.
RETRIEVERS: Registry[list[Ints]] = Registry("workload.questions.retrieval", given=("passages", "queries", "draw"))
RETRIEVERS.later("dense", "spanlab.dense_retrieval")


@RETRIEVERS.register("bm25")
def bm25(passages: Sequence[str], queries: Sequence[Query]) -> list[Ints]:
    """Okapi BM25 as Lucene scores it (k1 = 1.5, b = 0.75): words in lower case, English stop words left out."""
    import bm25s

    index = bm25s.BM25()
    words = bm25s.tokenize([*passages, *(query.text for query in queries)], return_ids=False, show_progress=False)
    if not any(words[: len(passages)]):
        raise ValueError("workload.questions.retrieval=bm25: expected passages with words, not stop words alone")
    index.index(words[: len(passages)], show_progress=False)
    return [by_score(index.get_scores(asked)) for asked in words[len(passages) :]]


@RETRIEVERS.register("given")
def given(passages: Sequence[str], queries: Sequence[Query], draw: np.random.Generator) -> list[Ints]:
    """The passages that the file names, in its order; else the gold ones, then others drawn at random."""
    return [_given(query, len(passages), draw) for query in queries]


def _given(query: Query, count: int, draw: np.random.Generator) -> Ints:
    if query.ranking is not None:
        return np.array(query.ranking, dtype=np.int64)
    if query.gold is None:
        raise ValueError(
            "workload.questions.retrieval=given: expected bm25 or dense, for the task does not know its gold passages"
        )
    others = np.setdiff1d(np.arange(count), query.gold)
    return np.concatenate([np.array(query.gold, dtype=np.int64), draw.permutation(others)])


def by_score(scores: Floats) -> Ints:
    """Numbers from the highest score to the lowest; equal ones in their order."""
    return np.argsort(-scores, kind="stable")

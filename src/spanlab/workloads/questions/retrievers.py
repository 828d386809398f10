"""Retrievers: rankings of passages for each question, best first."""

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
    """Input of a retriever; numbers are indexes of the searched passages.

    `gold`, `ranking`  as in a task's question; None if unknown.
    """

    text: str
    gold: tuple[int, ...] | None = None
    ranking: tuple[int, ...] | None = None


#: Functions of passages and queries that return, for each query, numbers of passages, best first.
RETRIEVERS: Registry[list[Ints]] = Registry("workload.questions.retrieval", given=("passages", "queries", "draw"))
RETRIEVERS.later("dense", "spanlab.dense_retrieval")


@RETRIEVERS.register("bm25")
def bm25(passages: Sequence[str], queries: Sequence[Query]) -> list[Ints]:
    """Okapi BM25 as Lucene scores it (k1 = 1.5, b = 0.75): lower-case words without English stop words."""
    import bm25s

    index = bm25s.BM25()
    word_lists = bm25s.tokenize([*passages, *(query.text for query in queries)], return_ids=False, show_progress=False)
    if not any(word_lists[: len(passages)]):
        raise ValueError("workload.questions.retrieval=bm25: expected passages with words, not stop words alone")
    index.index(word_lists[: len(passages)], show_progress=False)
    # Without words, as of stop words alone, a question scores zero everywhere, as one whose words are in no passage.
    no_scores = np.zeros(len(passages))
    return [
        rank_by_score(index.get_scores(query_words) if query_words else no_scores)
        for query_words in word_lists[len(passages) :]
    ]


@RETRIEVERS.register("given")
def rank_as_given(passages: Sequence[str], queries: Sequence[Query], draw: np.random.Generator) -> list[Ints]:
    """Rank passages as the file lists them; else the gold passages first, then the others in random order."""
    return [_given_ranking(query, len(passages), draw) for query in queries]


def _given_ranking(query: Query, count: int, rng: np.random.Generator) -> Ints:
    if query.ranking is not None:
        return np.array(query.ranking, dtype=np.int64)
    if query.gold is None:
        raise ValueError(
            "workload.questions.retrieval=given: expected bm25 or dense, because the task has no gold passages"
        )
    other_passages = np.setdiff1d(np.arange(count), query.gold)
    return np.concatenate([np.array(query.gold, dtype=np.int64), rng.permutation(other_passages)])


def rank_by_score(scores: Floats) -> Ints:
    """Return passage numbers by decreasing score; ties keep their order."""
    return np.argsort(-scores, kind="stable")

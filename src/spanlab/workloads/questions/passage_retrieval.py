"""Retrieval of the passages of each prompt, from a document or from the corpus, and their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from spanlab.workloads.questions.retrievers import RETRIEVERS, Ints, Query
from spanlab.workloads.questions.task import Document, Question
from spanlab.workloads.retrieval import ORDERS

if TYPE_CHECKING:
    from spanlab.workloads.questions.kind import Questions

SEARCHES = ("corpus", "document")


@dataclass(frozen=True, slots=True)
class RetrievedPassages:
    """A question with the passages of its prompt.

    `document`  number of its document among the selected documents.
    `passages`  passages in the order of the prompt.
    `gold`      positions of the retrieved gold passages in the prompt, the one that states the answer first; None if
                unknown.
    `position`  position of the passage that states the answer; −1: not retrieved; None if unknown.
    `stated`    text of the passage that states the answer; None if unknown.
    """

    document: int
    question: Question
    passages: tuple[str, ...]
    gold: tuple[int, ...] | None
    position: int | None
    stated: str | None


def retrieve_passages(documents: Sequence[Document], options: Questions) -> list[RetrievedPassages]:
    """Retrieve the passages of each question by document; ValueError if no question can get k passages."""
    scopes = (
        [tuple(range(len(documents)))]
        if options.search == "corpus"
        else [(number,) for number in range(len(documents))]
    )
    # One stream for each kind of draw, so that another order changes nothing else.
    rng, order_rng = (np.random.default_rng([options.seed, stream]) for stream in (1, 2))
    results = [result for numbers in scopes for result in _search(documents, numbers, options, rng, order_rng)]
    most_passages = max(len(result.passages) for result in results)
    if options.k is not None and options.k > most_passages:
        raise ValueError(
            f"workload.questions.k={options.k}: expected at most {most_passages}, the passages that can be retrieved"
        )
    return results


def _search(
    documents: Sequence[Document],
    numbers: Sequence[int],
    options: Questions,
    draw: np.random.Generator,
    shuffle: np.random.Generator,
) -> Iterator[RetrievedPassages]:
    """Retrieve passages from these documents for the questions about them; equal passages count once."""
    passage_numbers: dict[str, int] = {}
    for number in numbers:
        for passage in documents[number].passages:
            passage_numbers.setdefault(passage, len(passage_numbers))
    passages = tuple(passage_numbers)
    pairs = [(number, question) for number in numbers for question in documents[number].questions]
    queries = [_query(question, documents[number].passages, passage_numbers) for number, question in pairs]
    rankings = RETRIEVERS.make(options.retrieval, {}, {}, passages=passages, queries=queries, draw=draw)
    for (number, question), query, ranking in zip(pairs, queries, rankings, strict=True):
        order = ORDERS[options.order](ranking[: options.k], shuffle)
        yield _result(number, question, query, order, passages)


def _query(question: Question, passages: Sequence[str], passage_numbers: dict[str, int]) -> Query:
    gold, ranking = (
        None if numbers is None else tuple(passage_numbers[passages[index]] for index in numbers)
        for numbers in (question.gold, question.ranking)
    )
    return Query(question.text, gold, ranking)


def _result(number: int, question: Question, query: Query, order: Ints, passages: Sequence[str]) -> RetrievedPassages:
    texts = tuple(passages[index] for index in order)
    if query.gold is None:
        return RetrievedPassages(number, question, texts, None, None, None)
    position_of = {passage: index for index, passage in enumerate(order.tolist())}
    gold = tuple(position_of[passage] for passage in query.gold if passage in position_of)
    first = query.gold[0]
    return RetrievedPassages(number, question, texts, gold, position_of.get(first, -1), passages[first])

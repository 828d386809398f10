"""The passages of each prompt: found by a retriever in a document or in the corpus, then put in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from spanlab.workloads.questions.retrievers import RETRIEVERS, Ints, Query
from spanlab.workloads.questions.task import Document, Question
from spanlab.workloads.retrieval import ORDERS

SEARCHES = ("corpus", "document")


class RetrievalOptions(Protocol):
    """The part of the workload's options that says how passages are found; `kind.Questions` describes them."""

    retrieval: str
    search: str
    k: int | None
    order: str
    seed: int


@dataclass(frozen=True, slots=True)
class Found:
    """A question with the passages of its prompt.

    `document`  number of its document among those that are asked about.
    `passages`  in the order of the prompt.
    `gold`      places in the prompt of the gold passages that were found, the one that states the answer first; None
                where they are not known.
    `position`  place of the passage that states the answer; −1: not found; None where it is not known.
    `stated`    that passage; None where it is not known.
    """

    document: int
    question: Question
    passages: tuple[str, ...]
    gold: tuple[int, ...] | None
    position: int | None
    stated: str | None


def found_passages(documents: Sequence[Document], options: RetrievalOptions) -> list[Found]:
    """The passages of each question, document by document; ValueError where no question gets k of them."""
    searched = [tuple(range(len(documents)))] if options.search == "corpus" else [(at,) for at in range(len(documents))]
    # One stream for each kind of draw, so that another order changes nothing else.
    draw, shuffle = (np.random.default_rng([options.seed, stream]) for stream in (1, 2))
    found = [one for numbers in searched for one in _search(documents, numbers, options, draw, shuffle)]
    most = max(len(one.passages) for one in found)
    if options.k is not None and options.k > most:
        raise ValueError(f"workload.questions.k={options.k}: expected at most {most}, the passages that can be found")
    return found


def _search(
    documents: Sequence[Document],
    numbers: Sequence[int],
    options: RetrievalOptions,
    draw: np.random.Generator,
    shuffle: np.random.Generator,
) -> Iterator[Found]:
    """Search these documents together for what is asked about them; equal passages count once."""
    places: dict[str, int] = {}
    for number in numbers:
        for passage in documents[number].passages:
            places.setdefault(passage, len(places))
    passages = tuple(places)
    asked = [(number, question) for number in numbers for question in documents[number].questions]
    queries = [_query(question, documents[number].passages, places) for number, question in asked]
    ranked = RETRIEVERS.make(options.retrieval, {}, {}, passages=passages, queries=queries, draw=draw)
    for (number, question), query, ranking in zip(asked, queries, ranked, strict=True):
        order = ORDERS[options.order](ranking[: options.k], shuffle)
        yield _found(number, question, query, order, passages)


def _query(question: Question, passages: Sequence[str], places: dict[str, int]) -> Query:
    gold, ranking = (
        None if numbers is None else tuple(places[passages[at]] for at in numbers)
        for numbers in (question.gold, question.ranking)
    )
    return Query(question.text, gold, ranking)


def _found(number: int, question: Question, query: Query, order: Ints, passages: Sequence[str]) -> Found:
    texts = tuple(passages[at] for at in order)
    if query.gold is None:
        return Found(number, question, texts, None, None, None)
    where = {passage: at for at, passage in enumerate(order.tolist())}
    gold = tuple(where[passage] for passage in query.gold if passage in where)
    first = query.gold[0]
    return Found(number, question, texts, gold, where.get(first, -1), passages[first])

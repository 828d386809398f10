"""Sequences of the recall task: documents that may contradict each other, and questions about their facts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from spanlab.settings.probe import SPECIAL, TaskSettings

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

DOCUMENT, QUESTION = range(SPECIAL)


@dataclass(frozen=True)
class Shape:
    """Numbers of documents of a sequence, and of tokens and facts of each document."""

    documents: int
    tokens: int
    facts: int


@dataclass(frozen=True)
class Batch:
    """Sequences of one shape.

    `documents`  token ids [N, D, L]; a document begins with a start mark
    `questions`  token ids [N, 2 Q]: a mark and a key per question; the answer is predicted at the key
    `gold`       value [N, Q] of the key in the last document that has it
    `updated`    [N, Q]: the key has more than one value
    `first`      [N, Q]: the key has one value, in the first document
    """

    documents: Ints
    questions: Ints
    gold: Ints
    updated: Bools
    first: Bools


def draw(rng: np.random.Generator, task: TaskSettings, shape: Shape, count: int) -> Batch:
    """Draw `count` sequences."""
    drawn = [_draw_one(rng, task, shape) for _ in range(count)]
    parts = (np.stack(parts) for parts in zip(*drawn, strict=True))
    return Batch(*parts)


def _draw_one(rng: np.random.Generator, task: TaskSettings, shape: Shape) -> tuple[Ints, Ints, Ints, Bools, Bools]:
    keys = _keys(rng, task, shape)
    values = SPECIAL + task.keys + rng.permutation(task.values)[: keys.size].reshape(keys.shape)
    documents = [_document(rng, task, shape, *facts) for facts in zip(keys, values, strict=True)]
    last = dict(zip(keys.flat, values.flat, strict=True))
    question_keys = np.resize(rng.permutation(list(last)), task.questions)
    times = np.array([(keys == key).sum() for key in question_keys])
    marks = np.full(task.questions, QUESTION)
    questions, gold = np.stack([marks, question_keys], axis=1).ravel(), np.array([last[key] for key in question_keys])
    return np.stack(documents), questions, gold, times > 1, (times == 1) & np.isin(question_keys, keys[0])


def _keys(rng: np.random.Generator, task: TaskSettings, shape: Shape) -> Ints:
    """Keys by document [D, F], distinct within a document."""
    fresh = iter(SPECIAL + rng.permutation(task.keys))
    keys = np.empty((shape.documents, shape.facts), np.int64)
    for number, row in enumerate(keys):
        repeated = rng.binomial(shape.facts, task.updated) if number else 0
        row[:repeated] = rng.permutation(np.unique(keys[:number]))[:repeated]
        row[repeated:] = list(islice(fresh, shape.facts - repeated))
    return keys


def _document(rng: np.random.Generator, task: TaskSettings, shape: Shape, keys: Ints, values: Ints) -> Ints:
    """One document [L]: its start mark, then facts in random order among filler."""
    order = rng.permutation(shape.facts)
    filler = shape.tokens - 1 - 2 * shape.facts
    is_fact = rng.permutation(filler + shape.facts) < shape.facts
    filler_tokens = rng.integers(SPECIAL + task.keys + task.values, task.vocabulary, len(is_fact))
    pieces = np.stack([filler_tokens, np.full(len(filler_tokens), -1)], axis=1)
    pieces[is_fact] = np.stack([keys[order], values[order]], axis=1)
    return np.concatenate([[DOCUMENT], pieces[pieces >= 0]])

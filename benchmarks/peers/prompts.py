"""Prompts of the comparison: four documents and a question, in the same order again and in another one.

Words are consecutive words of real texts, or drawn from the vocabulary. Every trial has words of its own, so that no
cache holds them from an earlier trial.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from names import ORDERS
from transformers import AutoTokenizer

from spanlab.core.request import Request, Span

DOCUMENTS = 4
QUESTION_WORDS = 12
SPACE = "Ġ"  # of the tokenizer, before a word


@dataclass(frozen=True)
class Trial:
    """Requests of one trial by kind: cold, same and shuffled; the documents are the same, each question is new."""

    requests: dict[str, Request]

    @classmethod
    def of(cls, texts: list[np.ndarray], questions: list[np.ndarray]) -> Trial:
        """Return the trial of documents and questions, int32 token ids."""
        documents = [Span(tokens, independent=True) for tokens in texts]
        asked = zip(ORDERS.items(), questions, strict=True)
        return cls(
            {
                kind: Request(number, 0, (*(documents[at] for at in order), Span(question)), 1)
                for number, ((kind, order), question) in enumerate(asked)
            }
        )


def ids_of(request: Request) -> list[int]:
    """Return the prompt of a request."""
    return np.concatenate([span.tokens for span in request.spans]).tolist()


def real_words(file: Path) -> Iterator[str]:
    """Yield the words of a file of JSON lines, again and again; the text of a line is its longest string."""
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    texts = [max((value for value in row.values() if isinstance(value, str)), key=len) for row in rows]
    while True:
        for text in texts:
            yield from text.split()


class Prompts:
    """Draws trials; `texts` is a file of JSON lines, or None for drawn words."""

    def __init__(self, folder: Path, texts: Path | None) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._draw = np.random.default_rng(0)
        self._words = None if texts is None else real_words(texts)
        vocabulary = self._tokenizer.get_vocab().items()
        self._single = np.array([at for word, at in sorted(vocabulary) if word[:1] == SPACE and word[1:].isalpha()])

    @property
    def source(self) -> str:
        """Where the words come from."""
        return "drawn from the vocabulary" if self._words is None else "of real texts"

    def trial(self, words: int) -> Trial:
        """Return a trial whose documents have `words` words together."""
        texts = [self._tokens(words // DOCUMENTS) for _ in range(DOCUMENTS)]
        return Trial.of(texts, [self._tokens(QUESTION_WORDS) for _ in ORDERS])

    def trial_of_tokens(self, tokens: int) -> Trial:
        """Return a trial whose prompts have exactly so many drawn tokens."""
        length = (tokens - QUESTION_WORDS) // DOCUMENTS
        rest = tokens - length * DOCUMENTS
        return Trial.of([self._drawn(length) for _ in range(DOCUMENTS)], [self._drawn(rest) for _ in ORDERS])

    def _tokens(self, words: int) -> np.ndarray:
        if self._words is None:
            return self._drawn(words)
        text = " " + " ".join(islice(self._words, words))
        return np.array(self._tokenizer.encode(text, add_special_tokens=False), np.int32)

    def _drawn(self, count: int) -> np.ndarray:
        return self._draw.choice(self._single, count).astype(np.int32)

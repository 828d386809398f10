"""Texts of the benchmark: documents that nobody has seen, a system prompt, fresh questions.

With the built-in tokenizer every word is one of its vocabulary, so that a text of n words has exactly n tokens; any
other tokenizer gets the words of `evaluation.fresh_text`, of which it knows none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from spanlab.evaluation.fresh_text import MOST_TRIALS, fresh_documents, lorem
from spanlab.queries.builtin import invented_words

_SYSTEM_WORDS = 8


@dataclass(frozen=True)
class Texts:
    """Where the words of a run come from.

    `documents`  (trial, count, words) -> texts of exactly so many words; no two of one run begin alike
    `words`      (key, count) -> a text of so many words; the key decides them
    `trials`     trials of `count` documents that there are openings for
    """

    documents: Callable[[int, int, int], list[str]]
    words: Callable[[tuple[int, ...], int], str]
    trials: Callable[[int], int]

    @property
    def system(self) -> str:
        """What every prompt begins with."""
        return self.words((0,), _SYSTEM_WORDS)

    def question(self, trial: int, index: int, words: int) -> str:
        """A question that is asked once."""
        return self.words((1, trial, index), words)


def one_token_words(seed: int) -> Texts:
    """Texts in the vocabulary of the built-in tokenizer."""
    vocabulary = invented_words()
    openings = np.random.default_rng([seed, 2]).permutation(len(vocabulary))

    def drawn(key: tuple[int, ...], count: int) -> list[str]:
        return [vocabulary[k] for k in np.random.default_rng([seed, *key]).integers(len(vocabulary), size=count)]

    def documents(trial: int, count: int, words: int) -> list[str]:
        first = openings[trial * count : (trial + 1) * count]
        return [
            " ".join([vocabulary[opening], *drawn((3, trial, words, number), words - 1)])
            for number, opening in enumerate(first)
        ]

    return Texts(documents, lambda key, count: " ".join(drawn(key, count)), lambda count: len(vocabulary) // count)


def fresh_words(seed: int) -> Texts:
    """Texts of words that no language has, for any tokenizer."""

    def words(key: tuple[int, ...], count: int) -> str:
        return " ".join(lorem(count, np.random.default_rng([seed, *key])))

    def documents(trial: int, count: int, length: int) -> list[str]:
        return fresh_documents(seed, trial, count, length)

    return Texts(documents, words, lambda count: MOST_TRIALS)

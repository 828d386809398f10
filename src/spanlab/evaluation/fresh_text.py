"""Documents of invented words for timing: fresh in every trial, so that nothing of them can lie in a cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spanlab.evaluation.invented_words import WORDS, invented_word

#: Document lengths in words, by the names that the benchmark uses.
DOCUMENT_WORDS = {"xs": 10, "sm": 50, "m": 200, "lg": 500, "xl": 1000, "xxl": 2000}

MOST_DOCUMENTS = 256
MOST_TRIALS = WORDS // MOST_DOCUMENTS

_SENTENCE_WORDS = 8
# Coprime to WORDS, so that k ↦ (step · k + start) mod WORDS gives each word once and neighbours differ in their first
# letter; near WORDS over the golden ratio, which spreads the words evenly.
_STEP = 1_281_557


def fresh_documents(seed: int, trial: int, count: int, words: int) -> list[str]:
    """Make `count` documents of exactly `words` invented words; seed, trial and length alone decide them.

    Under one seed no two documents begin with the same word, in whichever trials they stand, so no cache finds a
    common prefix of one word: give every cold request of a run its own trial number, 0 ≤ trial < MOST_TRIALS.
    """
    _within("seed", seed, 0, (1 << 63) - 1)
    _within("trial", trial, 0, MOST_TRIALS - 1)
    _within("documents", count, 1, MOST_DOCUMENTS)
    _within("words", words, 1, 1 << 24)
    rng = np.random.default_rng([seed, trial, words])
    start = int(np.random.default_rng(seed).integers(WORDS))
    numbers = range(trial * MOST_DOCUMENTS, trial * MOST_DOCUMENTS + count)
    openings = [invented_word((_STEP * number + start) % WORDS) for number in numbers]
    return [_sentences([opening, *lorem(words - 1, rng)]) for opening in openings]


def lorem(words: int, rng: np.random.Generator) -> list[str]:
    """Draw so many invented words; a few of many may be equal."""
    return [invented_word(number) for number in rng.integers(WORDS, size=words).tolist()]


def _sentences(words: Sequence[str]) -> str:
    parts = [words[start : start + _SENTENCE_WORDS] for start in range(0, len(words), _SENTENCE_WORDS)]
    return " ".join(f"{' '.join(part).capitalize()}." for part in parts)


def _within(key: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{key}={value}: expected a whole number from {low} to {high}")

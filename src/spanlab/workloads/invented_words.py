"""Numbered words that do not exist in English; different numbers give different words."""

from __future__ import annotations

import math

import numpy as np

_ONSETS = "bdfhlmnprtvw"
_VOWELS = "aeiou"
_CODAS = "lmnrst"
_LAST_VOWELS = "aiou"
_ENDINGS = "qz"
#: Letters of each position: ve-lon-diq. All words have the same length, so no word is a substring of another.
_LETTERS = (_ONSETS, _VOWELS, _ONSETS, _VOWELS, _CODAS, _ONSETS, _LAST_VOWELS, _ENDINGS)

WORDS = math.prod(map(len, _LETTERS))


def invented_word(number: int) -> str:
    """Return the word of eight letters for `number`, 0 ≤ number < WORDS: one letter per mixed-radix digit.

    Different numbers give different words; the lowest digit is the first letter.
    """
    assert 0 <= number < WORDS, "there is no word with this number"
    word = []
    for choices in _LETTERS:
        number, digit = divmod(number, len(choices))
        word.append(choices[digit])
    return "".join(word)


class WordGenerator:
    """Generator of distinct invented words; the same random state gives the same words."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._used: set[int] = set()

    def fresh(self) -> str:
        """Return a word that this generator has not returned before."""
        if len(self._used) > WORDS // 2:
            raise ValueError(f"names={len(self._used)}: expected at most {WORDS // 2} different names")
        while (number := int(self._rng.integers(WORDS))) in self._used:
            pass
        self._used.add(number)
        return invented_word(number)

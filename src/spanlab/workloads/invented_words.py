"""Words that English does not have, numbered, so that drawing different numbers draws different words."""

from __future__ import annotations

import math

import numpy as np

_ONSETS = "bdfhlmnprtvw"
_VOWELS = "aeiou"
_CODAS = "lmnrst"
_LAST_VOWELS = "aiou"
_ENDINGS = "qz"
#: One letter from each place: ve-lon-diq. All words are equally long, so none is part of another.
_PLACES = (_ONSETS, _VOWELS, _ONSETS, _VOWELS, _CODAS, _ONSETS, _LAST_VOWELS, _ENDINGS)

WORDS = math.prod(map(len, _PLACES))


def invented_word(number: int) -> str:
    """Word of eight letters that stands for `number`, 0 ≤ number < WORDS: its digits in mixed radix, one letter each.

    Different numbers give different words; the lowest digit is the first letter.
    """
    assert 0 <= number < WORDS, "there is no word with this number"
    letters = []
    for place in _PLACES:
        number, digit = divmod(number, len(place))
        letters.append(place[digit])
    return "".join(letters)


class WordMint:
    """Hands out invented words, none of them twice; the same generator gives the same words."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._given: set[int] = set()

    def fresh(self) -> str:
        """A word that this mint has not given before."""
        if len(self._given) > WORDS // 2:
            raise ValueError(f"names={len(self._given)}: expected at most {WORDS // 2} different names")
        while (number := int(self._rng.integers(WORDS))) in self._given:
            pass
        self._given.add(number)
        return invented_word(number)

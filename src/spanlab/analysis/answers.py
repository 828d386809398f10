"""Scores of a generated answer against gold answers: normalised exact match, stated, token F1."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence

Score = Callable[[str, str], float]

_ARTICLES = frozenset({"a", "an", "the"})
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_APOSTROPHES = re.compile(r"(?<=\w)['\u2019](?=\w)")
# A run of letters and digits, which a point between digits does not end; a sign or point before it is the number's own.
_TOKEN = re.compile(r"(?:(?<![\w.])-?\.?(?=\d))?[^\W_]+(?:(?<=\d)\.(?=\d)[^\W_]+)*")
_NUMBER = re.compile(r"-?\.?\d[\d.]*")


def normalised(text: str) -> list[str]:
    """Tokens of a text: lower case, no punctuation, no articles unless nothing else is there.

    As SQuAD's evaluation does, but numbers stay whole: "1,000" is one token, "4.5" is not "45", "-5" is not "5".
    """
    plain = unicodedata.normalize("NFKC", text).lower().replace("\u2212", "-")
    ungrouped = _GROUPED.sub(lambda number: number[0].replace(",", ""), plain)
    tokens: list[str] = _TOKEN.findall(_APOSTROPHES.sub("", ungrouped))
    return [token for token in tokens if token not in _ARTICLES] or tokens


def exact_match(answer: str, gold: str) -> float:
    """1 where both normalise to the same tokens, else 0."""
    return float(normalised(answer) == _gold(gold))


def stated(answer: str, gold: str) -> float:
    """1 where gold's tokens stand in the answer, together and whole, and beside a number no other number; else 0.

    For models that answer in a sentence; naming several numbers to be right with one of them does not count.
    """
    said, wanted = normalised(answer), _gold(gold)
    if _numbers(wanted) and not _numbers(said) <= _numbers(wanted):
        return 0.0
    places = range(len(said) - len(wanted) + 1)
    return float(any(said[place : place + len(wanted)] == wanted for place in places))


def token_f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall over tokens as bags, 0 to 1 (SQuAD, Rajpurkar et al. 2016)."""
    said, wanted = Counter(normalised(answer)), Counter(_gold(gold))
    common = (said & wanted).total()
    return 2 * common / (said.total() + wanted.total())


def best(score: Score, answer: str, golds: Sequence[str]) -> float:
    """The highest score over several gold answers, each as good as the others."""
    if not golds:
        raise ValueError("golds=[]: expected at least one gold answer")
    return max(score(answer, gold) for gold in golds)


def _gold(gold: str) -> list[str]:
    wanted = normalised(gold)
    if not wanted:
        raise ValueError(f"gold={gold!r}: expected an answer with at least one letter or digit")
    return wanted


def _numbers(tokens: Sequence[str]) -> set[str]:
    return {token for token in tokens if _NUMBER.fullmatch(token)}

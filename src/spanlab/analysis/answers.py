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
# A run of letters and digits. A point between digits does not end it; a sign or point before it belongs to the number.
_TOKEN = re.compile(r"(?:(?<![\w.])-?\.?(?=\d))?[^\W_]+(?:(?<=\d)\.(?=\d)[^\W_]+)*")
_NUMBER = re.compile(r"-?\.?\d[\d.]*")


def normalised(text: str) -> list[str]:
    """Return the tokens of a text in lower case, without punctuation, and without articles if other tokens remain.

    As in SQuAD's evaluation, except that numbers stay whole: "1,000" is one token, "4.5" is not "45", "-5" is not "5".
    """
    plain = unicodedata.normalize("NFKC", text).lower().replace("\u2212", "-")
    ungrouped = _GROUPED.sub(lambda number: number[0].replace(",", ""), plain)
    tokens: list[str] = _TOKEN.findall(_APOSTROPHES.sub("", ungrouped))
    return [token for token in tokens if token not in _ARTICLES] or tokens


def exact_match(answer: str, gold: str) -> float:
    """Return 1 if both texts normalise to the same tokens, else 0."""
    return float(normalised(answer) == _gold_tokens(gold))


def stated(answer: str, gold: str) -> float:
    """Return 1 if the answer contains gold's tokens in sequence and, for a gold number, no other number; else 0.

    For models that answer in a sentence. An answer that lists several numbers does not score.
    """
    tokens, gold_tokens = normalised(answer), _gold_tokens(gold)
    if _numbers(gold_tokens) and not _numbers(tokens) <= _numbers(gold_tokens):
        return 0.0
    starts = range(len(tokens) - len(gold_tokens) + 1)
    return float(any(tokens[start : start + len(gold_tokens)] == gold_tokens for start in starts))


def token_f1(answer: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall over bags of tokens, 0 to 1 (SQuAD, Rajpurkar et al. 2016)."""
    answer_counts, gold_counts = Counter(normalised(answer)), Counter(_gold_tokens(gold))
    common = (answer_counts & gold_counts).total()
    return 2 * common / (answer_counts.total() + gold_counts.total())


def best_score(score: Score, answer: str, golds: Sequence[str]) -> float:
    """Return the highest score over several equally valid gold answers."""
    if not golds:
        raise ValueError("golds=[]: expected at least one gold answer")
    return max(score(answer, gold) for gold in golds)


def _gold_tokens(gold: str) -> list[str]:
    tokens = normalised(gold)
    if not tokens:
        raise ValueError(f"gold={gold!r}: expected an answer with at least one letter or digit")
    return tokens


def _numbers(tokens: Sequence[str]) -> set[str]:
    return {token for token in tokens if _NUMBER.fullmatch(token)}

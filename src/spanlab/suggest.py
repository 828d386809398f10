"""Choices in words, with the one that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def among(value: str, choices: Iterable[str]) -> str:
    """The choices, and the nearest to a value, whatever its case."""
    choices, word = tuple(choices), value.lower()
    lower = {choice.lower(): choice for choice in choices}
    likeness = 0.8 if len(word) <= 4 else 0.6  # short words are alike by chance, as nope and none
    near = difflib.get_close_matches(word, lower, 1, likeness)
    near = near or [name for name in lower if word and name.startswith(word)]
    hint = f" (did you mean {lower[near[0]]}?)" if near else ""
    return f"one of {', '.join(choices)}{hint}"

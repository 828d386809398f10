"""Choices in words, with the one that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: Former names of keys and of their values, which readers of older commands may type.
RENAMED = {
    "token_budget": "max_num_batched_tokens",
    "chunked": "enable_chunked_prefill",
    "page": "block_size",
    "hit": "count_hit_as",
    "salt": "cache_salt",
    "KR": "rotate_keys",
    "QR": "rotate_queries",
    "MAT": "pre_rotated",
}


def among(value: str, choices: Iterable[str]) -> str:
    """The choices, and the nearest to a value, whatever its case; a former name is told its new one."""
    choices, word = tuple(choices), value.lower()
    if (new := RENAMED.get(value)) in choices:
        return f"one of {', '.join(choices)} (did you mean {new}? {value} was renamed to {new})"
    lower = {choice.lower(): choice for choice in choices}
    likeness = 0.8 if len(word) <= 4 else 0.6  # short words are alike by chance, as nope and none
    near = difflib.get_close_matches(word, lower, 1, likeness)
    near = near or [name for name in lower if word and name.startswith(word)]
    hint = f" (did you mean {lower[near[0]]}?)" if near else ""
    return f"one of {', '.join(choices)}{hint}"

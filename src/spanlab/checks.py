"""Refusing what makes no sense, in one sentence that names the key, the value and what was expected."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

REQUIRED: Any = "???"  # OmegaConf's mark of a value that must be given
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


def one_of(key: str, value: str, choices: Iterable[str]) -> None:
    """Refuse a value that is not among the choices, suggesting the nearest."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{key}={value}: expected {among(value, choices)}")


def require(chosen: str, *expected: tuple[str, object, object]) -> None:
    """Refuse values that do not go with a choice; each is given as its key, itself, and the only one that does."""
    for key, value, wanted in expected:
        if value != wanted:
            raise ValueError(f"{key}={value} with {chosen}: expected {wanted}")


def refuse_strangers(settings: object, path: str = "") -> None:
    """Refuse keys that no schema knows: `+key=value` on the command line can add them."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            refuse_strangers(value, f"{path}{name}.")
    if not is_dataclass(settings):
        return
    known = [field.name for field in fields(settings)]
    for name, value in list(vars(settings).items()):
        if name in known:
            refuse_strangers(value, f"{path}{name}.")
        elif not hasattr(type(settings), name):  # what a class computes once and keeps is no key
            raise ValueError(f"{path}{name}: no such key; expected {among(name, known)}")


def positive(key: str, value: float | None) -> None:
    """Refuse zero and below, and infinity; None passes."""
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{key}={value}: expected a number above zero")


def not_negative(key: str, value: float | None) -> None:
    """Refuse what is below zero, and infinity; None passes."""
    if value is not None and not 0 <= value < math.inf:
        raise ValueError(f"{key}={value}: expected zero or more")


def share(key: str, value: float, *, below_one: bool = False) -> None:
    """Refuse what is not a share of one."""
    if not (0 <= value < 1 if below_one else 0 <= value <= 1):
        raise ValueError(f"{key}={value}: expected a share from 0 to {'below 1' if below_one else '1'}")


def check_seeds(key: str, seeds: list[int]) -> None:
    """Refuse seeds that are absent, repeated, negative, or too large to be written down."""
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0 or max(seeds) >= 1 << 63:
        raise ValueError(f"{key}={seeds}: expected one or more different numbers from 0 to 2^63 - 1")


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

"""Checks of settings; each error is one sentence with the key, the value and what was expected."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

REQUIRED: Any = "???"  # OmegaConf's mark of a value that must be given
_MANY = 12  # choices, above which the nearest is named first
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
    """Raise ValueError for a value that is not among the choices, with the nearest choice."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{key}={value}: expected {among(value, choices)}")


def require(chosen: str, *expected: tuple[str, object, object]) -> None:
    """Raise ValueError for a value that does not go with a choice; `expected` has key, value, required value."""
    for key, value, required in expected:
        if value != required:
            raise ValueError(f"{key}={value} with {chosen}: expected {required}")


def refuse_unknown_keys(settings: object, path: str = "") -> None:
    """Raise ValueError for keys that are in no schema: `+key=value` on the command line can add them."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            refuse_unknown_keys(value, f"{path}{name}.")
    if not is_dataclass(settings):
        return
    keys = [field.name for field in fields(settings)]
    for name, value in list(vars(settings).items()):
        if name in keys:
            refuse_unknown_keys(value, f"{path}{name}.")
        elif not hasattr(type(settings), name):  # a cached property is no key
            raise ValueError(f"{path}{name}: no such key; expected {among(name, keys)}")


def positive(key: str, value: float | None) -> None:
    """Raise ValueError unless 0 < value < infinity; None passes."""
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{key}={value}: expected a number above zero")


def not_negative(key: str, value: float | None) -> None:
    """Raise ValueError unless 0 <= value < infinity; None passes."""
    if value is not None and not 0 <= value < math.inf:
        raise ValueError(f"{key}={value}: expected zero or more")


def share(key: str, value: float, *, below_one: bool = False) -> None:
    """Raise ValueError unless 0 <= value <= 1, or < 1 with `below_one`."""
    if not (0 <= value < 1 if below_one else 0 <= value <= 1):
        raise ValueError(f"{key}={value}: expected a share from 0 to {'below 1' if below_one else '1'}")


def check_seeds(key: str, seeds: list[int]) -> None:
    """Raise ValueError for no seeds, repeated, negative or too large ones."""
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0 or max(seeds) >= 1 << 63:
        raise ValueError(f"{key}={seeds}: expected one or more different numbers from 0 to 2^63 - 1")


def among(value: str, choices: Iterable[str]) -> str:
    """Return the list of choices with the nearest one, ignoring case; for a former name, its present name."""
    choices, word = tuple(choices), value.lower()
    if (new := RENAMED.get(value)) in choices:
        return f"one of {', '.join(choices)} (did you mean {new}? {value} was renamed to {new})"
    lower = {choice.lower(): choice for choice in choices}
    likeness = 0.8 if len(word) <= 4 else 0.6  # short words are alike by chance, as nope and none
    near = difflib.get_close_matches(word, lower, 1, likeness)
    near = near or [name for name in lower if word and name.startswith(word)]
    if near and len(choices) > _MANY:
        others = ", ".join(choice for choice in choices if choice != lower[near[0]])
        return f"one of {lower[near[0]]} (did you mean {lower[near[0]]}?), {others}"
    hint = f" (did you mean {lower[near[0]]}?)" if near else ""
    return f"one of {', '.join(choices)}{hint}"

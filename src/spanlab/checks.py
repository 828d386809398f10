"""Refusing what makes no sense, in one sentence that names the key, the value and what was expected."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from spanlab.suggest import among

REQUIRED: Any = "???"  # OmegaConf's mark of a value that must be given


def one_of(key: str, value: str, choices: Iterable[str]) -> None:
    """Refuse a value that is not among the choices, suggesting the nearest."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{key}={value}: expected {among(value, choices)}")


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

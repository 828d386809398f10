"""Which settings of several runs differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ABSENT = "–"


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Each setting that is not the same in all runs, by its whole key, with its value in each run.

    An arm that some runs lack is one setting, `arms.NAME`: present or –.
    """
    arms = [config.get("arms", {}) for config in configs]
    shared = set.intersection(*(set(own) for own in arms))
    names = dict.fromkeys(name for own in arms for name in own if name not in shared)
    presence = {f"arms.{name}": tuple("present" if name in own else ABSENT for own in arms) for name in names}
    settings = [dict(leaves(_with_arms(config, shared))) for config in configs]
    keys = dict.fromkeys(key for own in settings for key in own)
    values = {key: tuple(str(own.get(key, ABSENT)) for own in settings) for key in keys}
    return {key: found for key, found in (values | presence).items() if len(set(found)) > 1}


def _with_arms(config: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    arms = config.get("arms", {})
    return {**config, "arms": {name: arms[name] for name in arms if name in names}}


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Settings that are no mapping, by their whole key."""
    if not isinstance(value, dict):
        yield key, value
        return
    for name, inner in value.items():
        yield from leaves(inner, f"{key}.{name}" if key else name)

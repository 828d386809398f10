"""Settings that differ between several runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ABSENT = "–"


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return each setting that differs between runs, by its full key, with its value in each run.

    An arm that some runs lack is one setting, `arms.NAME`, with the values present and –.
    """
    arms = [config.get("arms", {}) for config in configs]
    shared = set.intersection(*(set(run_arms) for run_arms in arms))
    names = dict.fromkeys(name for run_arms in arms for name in run_arms if name not in shared)
    presence = {f"arms.{name}": tuple("present" if name in run_arms else ABSENT for run_arms in arms) for name in names}
    settings = [dict(leaves(_with_arms(config, shared))) for config in configs]
    keys = dict.fromkeys(key for run_settings in settings for key in run_settings)
    values = {key: tuple(str(run_settings.get(key, ABSENT)) for run_settings in settings) for key in keys}
    return {key: by_run for key, by_run in (values | presence).items() if len(set(by_run)) > 1}


def _with_arms(config: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    arms = config.get("arms", {})
    return {**config, "arms": {name: arms[name] for name in arms if name in names}}


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings that are not mappings, with their full key."""
    if not isinstance(value, dict):
        yield key, value
        return
    for name, inner in value.items():
        yield from leaves(inner, f"{key}.{name}" if key else name)

"""What the settings of benchmarks on the real engine share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spanlab.checks import one_of
from spanlab.settings.arms import Strategy
from spanlab.settings.engine import EngineSettings

# settings of an engine study that mean nothing here: the value that they keep, and what is expected
_UNUSED: dict[str, tuple[Any, str]] = {
    "name": (None, "models=[...]"),
    "temperature": (0.0, "0, for the bench decodes greedily"),
    "clock": ("virtual", "virtual, for the bench has no arrivals to wait for"),
}


@dataclass
class BenchEngine(EngineSettings):
    """As `EngineSettings`, but for the name, since `models` are many.

    `name`         stays null here: `models` names them
    `temperature`  stays 0 here: decoding is greedy
    `clock`        stays skip_idle here: there are no arrivals to wait for
    `dtype`        of weights, keys and values
    """

    dtype: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("engine.dtype", self.dtype, ("float32", "bfloat16", "float16"))
        for key, (unset, expected) in _UNUSED.items():
            if getattr(self, key) != unset:
                raise ValueError(f"engine.{key}={getattr(self, key)}: expected {expected}")


def several(key: str, values: Sequence[Any]) -> Sequence[Any]:
    """Refuse an empty list and one that says something twice; returns it."""
    if not values or len(set(values)) != len(values):
        raise ValueError(f"{key}={values}: expected one or more, all different")
    return values


def check_arms(arms: Mapping[str, Strategy], only: Sequence[str], baseline: str) -> None:
    """Refuse arms that make no sense, and a baseline that is not always cold."""
    if not arms:
        raise ValueError("arms is empty: expected at least one strategy")
    for name, arm in arms.items():
        arm.check(f"arms.{name}")
        if arm.page & (arm.page - 1):
            raise ValueError(f"arms.{name}.page={arm.page}: expected a power of two, as the engine's pages are")
    for name in only:
        one_of("only", name, arms)
    one_of("baseline", baseline, arms)
    if arms[baseline].keep:
        raise ValueError(f"baseline={baseline}: expected an arm with keep=false, so that it is always cold")
    if only and baseline not in only:
        raise ValueError(f"only={only}: expected the baseline {baseline} too, as all are compared with it")


def chosen(arms: Mapping[str, Strategy], only: Sequence[str], baseline: str) -> list[str]:
    """Names of the arms to run, the baseline first, then in the order in which they are set."""
    names = [name for name in arms if not only or name in only]
    return sorted(names, key=lambda name: name != baseline)

"""What the settings of benchmarks on the real engine share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spanlab.settings.checks import one_of
from spanlab.settings.engine import EngineSettings


@dataclass
class BenchEngine(EngineSettings):
    """As `EngineSettings`, but for the name, since `models` are many; `dtype` of weights, keys and values."""

    dtype: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("engine.dtype", self.dtype, ("float32", "bfloat16", "float16"))
        for key, unset in (("name", None), ("temperature", 0.0)):
            if getattr(self, key) != unset:
                expected = "expected models=[...]" if key == "name" else "expected 0, for the bench decodes greedily"
                raise ValueError(f"engine.{key}={getattr(self, key)}: {expected}")


def several(key: str, values: Sequence[Any]) -> Sequence[Any]:
    """Refuse an empty list and one that says something twice; returns it."""
    if not values or len(set(values)) != len(values):
        raise ValueError(f"{key}={values}: expected one or more, all different")
    return values

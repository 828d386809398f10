"""A timing model fitted to measured steps: a price for each kind of work, and where it was measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from spanlab.core.step_features import StepFeatures
from spanlab_sim.timing import Nanoseconds

#: What a step is charged for, each with its count. Only `decode_context` may depend on the context of decodes, for
#: `CalibratedTiming.span` steps it alone.
TERMS: dict[str, Callable[[StepFeatures], int]] = {
    "step": lambda f: 1,
    "further_forward": lambda f: max(0, f.num_forwards - 1),
    "chunk": lambda f: f.num_prefills,
    "prefill_token": lambda f: f.prefill_tokens,
    "prefill_pair": lambda f: f.prefill_pairs,
    "prefill_context": lambda f: f.prefill_context,
    "decode": lambda f: f.num_decodes,
    "decode_context": lambda f: f.decode_context,
    "first_token": lambda f: f.num_first_tokens,
    "loaded_state_byte": lambda f: f.loaded_state_bytes,
    "captured_state_byte": lambda f: f.captured_state_bytes,
    "copied_token": lambda f: f.copied_tokens,
    "shallow_token_layer": lambda f: f.shallow_token_layers,
    "shallow_pair_layer": lambda f: f.shallow_pair_layers,
    "span_read": lambda f: f.span_reads,
    "turned_key": lambda f: f.turned_keys,
    "scan_run": lambda f: f.scan_runs,
    "scan_chunk": lambda f: f.scan_chunks,
    "projected_token": lambda f: f.projected_tokens,
    "composed_map": lambda f: f.composed_maps,
    "map_token": lambda f: f.map_tokens,
}
#: Terms, and their features, that profiles may lack: they were fitted before there were any such steps.
_LATER = {"composed_map": "composed_maps", "map_token": "map_tokens"}
_LATER_FEATURES = ("added_flops", "added_bytes")
_GROWING = "decode_context"


@dataclass(frozen=True)
class Profile:
    """How long steps of one model take on one machine.

    `machine`           as a study's summary names it; `device` is cpu or the card's name
    `threads`           of torch on the CPU; `dtype` of weights, keys and values
    `coefficients`      nanoseconds for each unit of a term, by term; none below zero
    `hull`              least and greatest value of every feature among the steps measured
    `left_out`          relative errors at shapes left out of the fit: median, p95 of their magnitude, signed mean
    `shapes`, `steps`   how many were measured; `longest` prompt among them, in tokens
    """

    model: str
    machine: str
    device: str
    threads: int
    dtype: str
    versions: dict[str, str]
    date: str
    commit: str
    coefficients: dict[str, float]
    hull: dict[str, tuple[int, int]]
    left_out: dict[str, float]
    shapes: int
    steps: int
    longest: int

    def write(self, path: Path) -> None:
        """Write it down as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def read_profile(path: Path) -> Profile:
    """Read a profile; ValueError, one sentence, where the file is none."""
    expected = "expected a profile as the entry calibrate writes it"
    try:
        told = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"timing.profile={path}: {error.strerror}; {expected}") from error
    except orjson.JSONDecodeError as error:
        raise ValueError(f"timing.profile={path}: {error}; {expected}") from error
    _add_later(told)
    if fault := _fault(told):
        raise ValueError(f"timing.profile={path}: {fault}; {expected}")
    told["hull"] = {name: (low, high) for name, (low, high) in told["hull"].items()}
    return Profile(**told)


def _add_later(told: Any) -> None:
    """Say of what a profile could not measure that it measured none: it costs nothing, and lies outside the hull."""
    if not isinstance(told, dict):
        return
    later: tuple[tuple[str, Iterable[str], object], ...] = (
        ("coefficients", _LATER.keys(), 0.0),
        ("hull", _LATER.values(), [0, 0]),
        ("hull", _LATER_FEATURES, [0, 0]),
    )
    for field, names, nothing in later:
        known = told.get(field)
        if isinstance(known, dict) and not known.keys() & set(names):
            told[field] = known | dict.fromkeys(names, nothing)


def _fault(told: Any) -> str:
    """What a file lacks to be a profile; empty where nothing."""
    if not isinstance(told, dict):
        return f"its contents are of type {type(told).__name__}"
    for name, kind in Profile.__annotations__.items():
        if name not in told:
            return f"{name} is missing"
        if not isinstance(told[name], _PLAIN[kind]):
            return f"{name} is of type {type(told[name]).__name__}"
    for name in told:
        if name not in Profile.__annotations__:
            return f"{name} is not known"
    return _wrong_coefficients(told["coefficients"]) or _wrong_hull(told["hull"])


_PLAIN: dict[str, type] = {"str": str, "int": int}
_PLAIN |= dict.fromkeys(("dict[str, str]", "dict[str, float]", "dict[str, tuple[int, int]]"), dict)


def _wrong_coefficients(coefficients: dict[str, Any]) -> str:
    if set(coefficients) != set(TERMS):
        return f"coefficients has {', '.join(sorted(set(coefficients) ^ set(TERMS)))} too many or too few"
    for name, price in coefficients.items():
        if not (isinstance(price, int | float) and 0 <= price < math.inf):
            return f"coefficients.{name} is {price}"
    return ""


def _wrong_hull(hull: dict[str, Any]) -> str:
    if set(hull) != set(StepFeatures._fields):
        return f"hull has {', '.join(sorted(set(hull) ^ set(StepFeatures._fields)))} too many or too few"
    for name, ends in hull.items():
        if not (isinstance(ends, list) and len(ends) == 2 and all(isinstance(end, int) for end in ends)):
            return f"hull.{name} is {ends}"
    return ""


class CalibratedTiming:
    """nanoseconds = sum over terms of coefficient · count, rounded.

    It answers beyond the hull too, and counts: `asked` steps, of which `outside` the hull, and in `extrapolated` by
    which of their features. A run of equal decode steps counts once, as its first step.
    """

    __slots__ = ("_fixed", "_growing", "_hull", "asked", "extrapolated", "outside")

    def __init__(self, profile: Profile) -> None:
        coefficients = {name: price for name, price in profile.coefficients.items() if price > 0}
        # 0.0 where it is free: the product then is exact and changes nothing
        self._growing = coefficients.pop(_GROWING, 0.0)
        self._fixed = [(TERMS[name], price) for name, price in coefficients.items()]
        self._hull = [profile.hull[name] for name in StepFeatures._fields]
        self.asked = self.outside = 0
        self.extrapolated: Counter[str] = Counter()

    def step(self, features: StepFeatures) -> int:
        """Nanoseconds that one step takes."""
        self._note(features)
        return int(features.decode_context * self._growing + self._without_context(features))

    def span(self, features: StepFeatures, k: int) -> Nanoseconds:
        """Durations of k steps with growing context: one straight line."""
        self._note(features)
        context = np.arange(k) * features.num_decodes + features.decode_context
        # As in `step`, one product and one sum of the same numbers, so that both round the same way.
        durations: Nanoseconds = (context * self._growing + self._without_context(features)).astype(np.int64)
        return durations

    def _without_context(self, features: StepFeatures) -> float:
        # The half rounds to the nearest nanosecond where int() cuts off.
        return sum([count(features) * price for count, price in self._fixed]) + 0.5

    def _note(self, features: StepFeatures) -> None:
        self.asked += 1
        at = [
            i
            for i, (value, (low, high)) in enumerate(zip(features, self._hull, strict=True))
            if value < low or value > high
        ]
        if at:
            self.outside += 1
            self.extrapolated.update([features._fields[i] for i in at])

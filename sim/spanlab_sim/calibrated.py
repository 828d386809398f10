"""A timing model fitted to measured steps: a price for each kind of work, and the range in which it was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import orjson

from spanlab.checks import not_negative
from spanlab.core.step_features import StepFeatures
from spanlab.typed_json import from_json, reading
from spanlab_sim.timing import Nanoseconds

#: The priced terms of a step, each with its count. Only `decode_context` may depend on the context of decodes, since
#: `CalibratedTiming.span` advances only this term.
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
#: Terms, and their features, that a profile may lack: it was fitted before such steps existed.
_LATER = {"composed_map": "composed_maps", "map_token": "map_tokens"}
_LATER_FEATURES = ("added_flops", "added_bytes")
_GROWING = "decode_context"


@dataclass(frozen=True)
class Profile:
    """Prices of the work of steps of one model on one machine.

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
        """Write the profile as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def read_profile(path: Path) -> Profile:
    """Read a profile; raises ValueError with one sentence for an invalid file."""
    with reading(f"timing.profile={path}", "a profile as the entry calibrate writes it"):
        profile = from_json(path.read_bytes(), Profile)
        coefficients, hull = dict(profile.coefficients), dict(profile.hull)
        # What a profile could not measure costs nothing, and its hull is [0, 0].
        if not coefficients.keys() & _LATER.keys():
            coefficients |= dict.fromkeys(_LATER, 0.0)
        for later in (_LATER.values(), _LATER_FEATURES):
            if not hull.keys() & set(later):
                hull |= dict.fromkeys(later, (0, 0))
        for field, given, names in (
            ("coefficients", set(coefficients), set(TERMS)),
            ("hull", set(hull), set(StepFeatures._fields)),
        ):
            if given != names:
                raise ValueError(f"{field} has {', '.join(sorted(given ^ names))} too many or too few")
        for name, price in coefficients.items():
            not_negative(f"coefficients.{name}", price)
        return replace(profile, coefficients=coefficients, hull=hull)


class CalibratedTiming:
    """nanoseconds = sum over terms of coefficient · count, rounded.

    It also predicts steps outside the hull. It counts predictions in `predicted`, those outside the hull in `outside`,
    and their extrapolated features in `extrapolated`. A run of equal decode steps counts once, as its first step.
    """

    __slots__ = ("_fixed", "_growing", "_hull", "extrapolated", "outside", "predicted")

    def __init__(self, profile: Profile) -> None:
        coefficients = {name: price for name, price in profile.coefficients.items() if price > 0}
        # 0.0 where it has no price: the product is then exact and changes nothing
        self._growing = coefficients.pop(_GROWING, 0.0)
        self._fixed = [(TERMS[name], price) for name, price in coefficients.items()]
        self._hull = [profile.hull[name] for name in StepFeatures._fields]
        self.predicted = self.outside = 0
        self.extrapolated: Counter[str] = Counter()

    def step(self, features: StepFeatures) -> int:
        """Return the nanoseconds of one step."""
        self._note(features)
        return int(features.decode_context * self._growing + self._without_context(features))

    def span(self, features: StepFeatures, k: int) -> Nanoseconds:
        """Return the durations of k steps with growing context: one straight line."""
        self._note(features)
        context = np.arange(k) * features.num_decodes + features.decode_context
        # As in `step`, one product and one sum of the same numbers, so that both round the same way.
        durations: Nanoseconds = (context * self._growing + self._without_context(features)).astype(np.int64)
        return durations

    def _without_context(self, features: StepFeatures) -> float:
        # The half rounds to the nearest nanosecond where int() cuts off.
        return sum([count(features) * price for count, price in self._fixed]) + 0.5

    def _note(self, features: StepFeatures) -> None:
        self.predicted += 1
        indices = [
            i
            for i, (value, (low, high)) in enumerate(zip(features, self._hull, strict=True))
            if value < low or value > high
        ]
        if indices:
            self.outside += 1
            self.extrapolated.update([features._fields[i] for i in indices])

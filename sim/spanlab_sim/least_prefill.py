"""The least time from an empty engine to a first token, by the tokens to compute."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spanlab.core.step_features import StepFeatures
from spanlab.model_spec import ModelSpec
from spanlab_sim.hardware import HardwareSpec
from spanlab_sim.timing import RooflineTiming, TimingModel

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LeastPrefill:
    """Nanoseconds that prompt tokens `[start, stop)` take at least, however they are cut into steps and batched.

    `step_ns` is the shortest step. Each step computes its share of the FLOPs besides its host time, and the timing
    model cuts it, half a nanosecond longer, off to a whole number. So one step for all tokens takes exactly
    floor(`computing`) where it computes nothing else, and k steps at least that if k - 1 host times exceed the k
    nanoseconds cut off. A shorter host time is made up for by a share of the FLOPs: k is at most time ÷ `step_ns`.
    """

    model: ModelSpec
    hardware: HardwareSpec
    step_ns: int

    def computing(self, start: Ints, stop: Ints) -> Floats:
        """Return FLOPs of the tokens and of one row of logits ÷ rate, plus host time and the half to be cut off."""
        flops = self.model.prefill_flops(start, stop) + self.model.head_flops
        host_ns = self.hardware.host_s * 1e9
        share = 1 / (1 + max(0.0, 1 - host_ns) / self.step_ns)
        nanoseconds = flops * (1e9 / self.hardware.flops_per_s) * share + (host_ns + 0.5)
        return np.asarray(nanoseconds, np.float64)


def least_prefill(timing: TimingModel, model: ModelSpec, hardware: HardwareSpec) -> LeastPrefill | None:
    """Return the bound of a timing model; None where its terms are no sums over tokens, or steps take 0 ns."""
    if not isinstance(timing, RooflineTiming):
        return None
    token = StepFeatures(prefill_tokens=1, prefill_pairs=1, num_prefills=1, num_first_tokens=1)
    step_ns = timing.step(token)
    return LeastPrefill(model, hardware, step_ns) if step_ns else None

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
    """Seconds that prompt tokens `[start, stop)` take at least, however they are cut into steps and batched.

    Both terms are below the time of any such steps: each computes its share of the FLOPs besides its host time, and
    the last one is no quicker than a step for one token. Steps are rounded to nanoseconds, which is left out.
    """

    model: ModelSpec
    hardware: HardwareSpec
    step_s: float

    def computing(self, start: Ints, stop: Ints) -> Floats:
        """Return FLOPs of the tokens and of one row of logits ÷ rate, plus host time."""
        flops = self.model.prefill_flops(start, stop) + self.model.head_flops
        seconds: Floats = flops / self.hardware.flops_per_s + self.hardware.host_s
        return seconds


def least_prefill(timing: TimingModel, model: ModelSpec, hardware: HardwareSpec) -> LeastPrefill | None:
    """Return the bound of a timing model; None where its terms are not known to be sums over tokens and pairs."""
    if not isinstance(timing, RooflineTiming):
        return None
    token = StepFeatures(prefill_tokens=1, prefill_pairs=1, num_prefills=1, num_first_tokens=1)
    return LeastPrefill(model, hardware, timing.step(token) * 1e-9)

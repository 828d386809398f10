"""A lower bound of the time of steps, from their work and a device's measured rates.

The formulas are those of `spanlab_sim.timing.RooflineTiming`, without host time and without the extra work of a
kernel that reads spans: T >= sum over steps of max(FLOPs / rate, bytes / rate).
"""

from __future__ import annotations

from collections.abc import Iterable

from spanlab.core.step_features import StepFeatures
from spanlab.device_rates import DeviceRates
from spanlab.model_spec import ModelSpec
from spanlab_sim.hardware import HardwareSpec
from spanlab_sim.timing import RooflineTiming


class Bound:
    """Lower bounds for one model on a device with these rates."""

    def __init__(self, model: ModelSpec, rates: DeviceRates) -> None:
        hardware = HardwareSpec(
            name="measured",
            peak_flops=rates.flops_per_s,
            bandwidth_bytes_per_s=rates.bytes_per_s,
            memory_gib=1.0,
            compute_efficiency=1.0,
            bandwidth_efficiency=1.0,
            host_s=0.0,
        )
        self._timing = RooflineTiming(model, hardware)

    def seconds(self, steps: Iterable[StepFeatures]) -> float:
        """Return the bound of steps that run one after another."""
        return sum(self._timing.step(_needed(step)) for step in steps) * 1e-9


def _needed(step: StepFeatures) -> StepFeatures:
    """Return the step without the work that depends on the kernel that reads its keys."""
    return step._replace(span_reads=0, turned_keys=0, num_forwards=1)

"""The physical bound of a request: what its steps must compute and move, at the machine's own rates.

The formulas are those of the simulator's roofline (`spanlab_sim.timing.RooflineTiming`), without host time and at the
full measured rates: T ≥ Σ over steps of max(FLOPs / rate, bytes / rate).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spanlab.bench.rates import Rates
from spanlab.core.repair import Repair
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.scheduler import ScheduledStep
from spanlab.core.step_features import StepFeatures, features
from spanlab.model_spec import ModelSpec
from spanlab_sim.hardware import HardwareSpec
from spanlab_sim.timing import RooflineTiming

_FREE = 1e30  # a rate at which a side of the roofline costs nothing


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds below which a request's first token cannot come, and both sides of the roofline summed on their own."""

    seconds: float
    compute_s: float
    memory_s: float


class Roofline:
    """Bounds for one model on one machine, and for one arm's `repair`."""

    def __init__(self, model: ModelSpec, rates: Rates, repair: Repair | None = None) -> None:
        repair = repair or Repair()
        self._rules = ReuseRules(repair=repair, copies=repair.measured)
        self._state_bytes = model.state_bytes
        flops, moved = rates.flops_per_s, rates.bytes_per_s
        self._sides = [RooflineTiming(model, _hardware(*side)) for side in ((flops, _FREE), (_FREE, moved))]

    def of(self, steps: Sequence[ScheduledStep]) -> Bound:
        """The bound of the steps up to a request's first token."""
        return self.of_work([features(step, self._state_bytes, self._rules) for step in steps])

    def of_work(self, work: Sequence[StepFeatures]) -> Bound:
        """The bound of steps that are told by what they do."""
        sides = [[side.step(one) for side in self._sides] for one in work]
        compute, memory = (sum(times) * 1e-9 for times in zip(*sides, strict=True))
        return Bound(sum(max(times) for times in sides) * 1e-9, compute, memory)


def _hardware(flops_per_s: float, bytes_per_s: float) -> HardwareSpec:
    return HardwareSpec(
        name="measured",
        peak_flops=flops_per_s,
        bandwidth_bytes_per_s=bytes_per_s,
        memory_gib=1.0,
        compute_efficiency=1.0,
        bandwidth_efficiency=1.0,
        host_s=0.0,
    )

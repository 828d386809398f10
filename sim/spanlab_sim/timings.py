"""Timing models by name; a model's parameters are its inputs from the study and its options."""

from __future__ import annotations

from collections.abc import Callable

from spanlab.model_spec import ModelSpec
from spanlab.registry import Registry
from spanlab_sim.calibrated import CalibratedTiming, Profile
from spanlab_sim.hardware import HardwareSpec
from spanlab_sim.timing import ConstantTiming, RooflineTiming, TimingModel

#: `read_profile` reads the profile at a path, or that of the study's model and machine.
TIMINGS: Registry[TimingModel] = Registry("timing", given=("model", "hardware", "read_profile"))


@TIMINGS.register("roofline")
def roofline(model: ModelSpec, hardware: HardwareSpec) -> TimingModel:
    """The slower of computing and moving bytes."""
    return RooflineTiming(model, hardware)


@TIMINGS.register("constant")
def constant(
    seconds_per_computed_token: float,
    seconds_per_step: float = 0.0,
    seconds_per_decode_token: float | None = None,
) -> TimingModel:
    """A fixed price per computed token and per step."""
    return ConstantTiming(seconds_per_computed_token, seconds_per_step, seconds_per_decode_token)


@TIMINGS.register("calibrated")
def calibrated(profile: str | None = None, *, read_profile: Callable[[str | None], Profile]) -> TimingModel:
    """What was fitted to measured steps; `profile` None takes that of the study's model and machine."""
    return CalibratedTiming(read_profile(profile))


TIMINGS.later("fitted", "spanlab_sim.fitted")

"""Calibrating the simulator: what is run on the engine to learn how long its steps take."""

from __future__ import annotations

from dataclasses import dataclass, field

from spanlab.checks import REQUIRED, not_negative, one_of, positive
from spanlab.model_spec import ModelSpec
from spanlab.settings.arms import Strategy, check_arm, check_learning
from spanlab.settings.engine import EngineSettings
from spanlab.settings.server import BatchSettings
from spanlab.settings.study import OutputSettings, TrackingSettings


@dataclass
class DesignSettings:
    """The shapes that are measured: a few requests each, over all lengths and batch sizes.

    `shapes`   number of shapes, distributed over the arms
    `repeats`  measurements of every shape, each time in another order; the median is used
    `longest`  most tokens of a prompt
    `outputs`  most output tokens of a request
    `seed`     of sizes, tokens and order
    """

    shapes: int = 48
    repeats: int = 3
    longest: int = 2048
    outputs: int = 6
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("shapes", "repeats", "longest", "outputs"):
            positive(f"design.{key}", getattr(self, key))
        not_negative("design.seed", self.seed)
        if self.longest < 16:
            raise ValueError(f"design.longest={self.longest}: expected 16 tokens or more")
        if self.shapes < 2:
            raise ValueError(f"design.shapes={self.shapes}: expected 2 or more, for each is predicted from the others")


@dataclass
class Calibrate:
    """One model on this machine; `arms` are measured as a study would run them, with its `batch` as the limit.

    A profile is valid for one device and one number of threads, those of `engine`.

    `model`     sizes of the model
    `batch`     limits of a step
    `engine`    weights and device
    `arms`      arms by name, measured as a study would run them
    `only`      names of the arms to measure; empty: all
    `design`    the shapes that are measured
    `output`    where the run is written
    `tracking`  experiment tracking
    """

    model: ModelSpec = REQUIRED
    batch: BatchSettings = field(default_factory=BatchSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    arms: dict[str, Strategy] = field(default_factory=dict)
    only: list[str] = field(default_factory=list)
    design: DesignSettings = field(default_factory=DesignSettings)
    output: OutputSettings = field(default_factory=OutputSettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)

    def __post_init__(self) -> None:
        if not self.arms:
            raise ValueError("arms is empty: expected at least one strategy, as in arms=checkpoints")
        for name, arm in self.arms.items():
            check_arm(name, arm, self.model)
            check_learning(name, arm, 0)
        for name in self.only:
            one_of("only", name, self.arms)

    def chosen(self) -> list[str]:
        """Names of the arms to measure, in the order in which they are set."""
        return [name for name in self.arms if not self.only or name in self.only]

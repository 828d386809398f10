"""Settings of the designed shapes, which calibrate the timing of engine steps."""

from __future__ import annotations

from dataclasses import dataclass

from spanlab.checks import not_negative, positive


@dataclass
class DesignSettings:
    """Shapes to measure for calibration: a few requests each, over all lengths and batch sizes.

    `shapes`   number of shapes, distributed over the arms
    `repeats`  measurements of every shape, each time in another order; the median is used
    `longest`  largest prompt, in tokens; null: that of the requests to predict
    `outputs`  most output tokens of a request; null: that of the requests to predict
    `seed`     seed of sizes, tokens and order
    """

    shapes: int = 48
    repeats: int = 3
    longest: int | None = None
    outputs: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("shapes", "repeats", "longest", "outputs"):
            positive(f"design.{key}", getattr(self, key))
        not_negative("design.seed", self.seed)
        if self.longest is not None and self.longest < 16:
            raise ValueError(f"design.longest={self.longest}: expected 16 tokens or more")
        if self.shapes < 2:
            raise ValueError(f"design.shapes={self.shapes}: expected 2 or more, for each is predicted from the others")

"""How far predictions and states are from those of exact recompute, by what was done instead."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spanlab.analysis import bootstrap
from spanlab.stats import Interval

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Departure:
    """What an arm predicts after the same tokens as recompute.

    `kl`      [N, Q]: KL(recompute ‖ arm), nats
    `same`    [N, Q]: both have the same likeliest token
    `right`   [N, Q]: the likeliest token is the gold answer
    `errors`  [L, N]: ‖S − S*‖ ÷ ‖S*‖ of every recurrent layer, Frobenius norms over heads
    `nbytes`  bytes of a stored state ÷ those in float32; 1 where it is stored so
    """

    kl: Floats
    same: NDArray[np.bool_]
    right: NDArray[np.bool_]
    errors: Floats
    nbytes: float = 1.0


@dataclass(frozen=True)
class Source:
    """Weights: their name, attention layers below each recurrent layer in order, and whether they were trained."""

    name: str
    below: tuple[int, ...]
    trained: bool


@dataclass(frozen=True)
class Measured:
    """An arm on one model over one gap; intervals are of 95 %, from resampled prompts.

    `right`   share of right answers; None for random weights
    `errors`  mean error of the states of the layers with 0, 1, … attention layers below
    """

    source: Source
    gap: int
    arm: str
    kl: Interval
    same: Interval
    right: float | None
    errors: tuple[float, ...]
    nbytes: float


def measured(source: Source, gap: int, arm: str, found: Departure) -> Measured:
    """Means over prompts and questions."""
    below = np.array(source.below)
    errors = tuple(float(found.errors[below == count].mean()) for count in range(max(below) + 1))
    counts = np.full((1, len(found.kl)), found.kl.shape[1], np.float64)
    return Measured(
        source,
        gap,
        arm,
        bootstrap.positive_ratio(found.kl.sum(1)[None], counts),
        bootstrap.share(found.same.sum(1, dtype=np.float64)[None], counts),
        float(found.right.mean()) if source.trained else None,
        errors,
        found.nbytes,
    )

"""Errors of predictions and states against exact recompute, by the arm that replaces it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spanlab.stats import Interval, positive_ratio, share

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Deviation:
    """Predictions and states of an arm compared with recompute, after the same tokens.

    `kl`      [N, Q]: KL(recompute ‖ arm), nats
    `same`    [N, Q]: both have the same likeliest token
    `right`   [N, Q]: the likeliest token is the gold answer
    `errors`  [L, N]: ‖S − S*‖ ÷ ‖S*‖ of every recurrent layer, Frobenius norms over heads
    `nbytes`  bytes of a stored state ÷ bytes in float32
    """

    kl: Floats
    same: NDArray[np.bool_]
    right: NDArray[np.bool_]
    errors: Floats
    nbytes: float = 1.0


@dataclass(frozen=True)
class Source:
    """Weights of a model: name, number of attention layers below each recurrent layer, and whether they are trained."""

    name: str
    below: tuple[int, ...]
    trained: bool


@dataclass(frozen=True)
class RecoveryResult:
    """Result of an arm on one model over one gap; 95 % intervals from resampled prompts.

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


def recovery_result(source: Source, gap: int, arm: str, deviation: Deviation) -> RecoveryResult:
    """Return means over prompts and questions."""
    below = np.array(source.below)
    errors = tuple(float(deviation.errors[below == count].mean()) for count in range(max(below) + 1))
    counts = np.full((1, len(deviation.kl)), deviation.kl.shape[1], np.float64)
    return RecoveryResult(
        source,
        gap,
        arm,
        positive_ratio(deviation.kl.sum(1)[None], counts),
        share(deviation.same.sum(1, dtype=np.float64)[None], counts),
        float(deviation.right.mean()) if source.trained else None,
        errors,
        deviation.nbytes,
    )

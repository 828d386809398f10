"""Equivalence of a predicted mean with a measured one: more noise never makes it easier to show."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from spanlab.stats import t_interval

#: Each of the two one-sided tests is at 5 %, which a two-sided 90 % interval does (Schuirmann, 1987).
LEVEL = 0.90

Ends = tuple[float, float]


def bias_interval(means: NDArray[np.float64], predicted: float) -> Ends | None:
    """90 % interval of predicted ÷ true mean − 1, from the means of repeats, shape (repeats,).

    Student's t over repeats, which serve the same arrivals: what differs between them is the
    machine. The upper end is infinite where the repeats do not tell the mean from zero; None for a
    single repeat.
    """
    found = t_interval(means, LEVEL)
    if found.low is None or found.high is None:
        return None
    return predicted / found.high - 1, predicted / found.low - 1 if found.low > 0 else math.inf


def equivalent(interval: Ends | None, margin: float) -> bool:
    """Whether two one-sided tests show that the error is within ± margin (TOST).

    That is so where the whole interval lies within the margin. The interval holds the observed
    error and widens with the spread of the repeats: noise can hide equivalence, never make it.
    """
    return interval is not None and -margin < interval[0] and interval[1] < margin

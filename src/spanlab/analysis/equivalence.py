"""Equivalence tests of a predicted and a measured mean; more noise never makes equivalence easier to show."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from spanlab.stats import t_interval

#: Two one-sided tests at 5 % each correspond to a two-sided 90 % interval (Schuirmann, 1987).
LEVEL = 0.90

Ends = tuple[float, float]


def bias_interval(means: NDArray[np.float64], predicted: float) -> Ends | None:
    """Return the 90 % interval of predicted ÷ true mean − 1, from the means of repeats, shape (repeats,).

    Student's t over repeats, which serve the same arrivals and differ only in noise of the machine.
    The upper end is infinite where the interval of the mean reaches zero. None for a single repeat.
    """
    ends = t_interval(means, LEVEL).ends
    if ends is None:
        return None
    low, high = ends
    return predicted / high - 1, predicted / low - 1 if low > 0 else math.inf


def equivalent(interval: Ends | None, margin: float) -> bool:
    """Return whether two one-sided tests show that the error is within ± margin (TOST).

    True where the whole interval lies within the margin. The interval contains the observed error
    and widens with the spread of the repeats, so noise can hide equivalence but never create it.
    """
    return interval is not None and -margin < interval[0] and interval[1] < margin

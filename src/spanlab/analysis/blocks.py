"""Mean and percentiles of one long run, with errors by a bootstrap over blocks of consecutive requests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spanlab.analysis.bootstrap import drawn_counts

Floats = NDArray[np.float64]

BLOCKS = 30
PERCENTS = {"p50": 50.0, "p95": 95.0, "p99": 99.0}
_MIN_BLOCK_REQUESTS = 10
_THRESHOLDS = 2048  # values at which the distribution is counted


class Estimate(NamedTuple):
    """A statistic and its standard error; None where the run is too short for two blocks."""

    value: float
    error: float | None


def block_estimates(values: Floats) -> dict[str, Estimate] | None:
    """Return mean and percentiles of `values`, shape (n,), in order of time; None where all are NaN.

    NaN values are ignored. Blocks are resampled with replacement (Carlstein 1986), so that requests that waited for
    the same event stay together.
    """
    valid = ~np.isnan(values)
    if not valid.any():
        return None
    blocks = number_of_blocks(len(values))
    block = np.arange(len(values)) * blocks // len(values)
    values, block = values[valid], block[valid]
    statistics = {"mean": float(values.mean())} | {
        name: float(np.percentile(values, percent)) for name, percent in PERCENTS.items()
    }
    errors = _errors(values, block, blocks) if blocks > 1 else dict.fromkeys(statistics)
    return {name: Estimate(value, errors[name]) for name, value in statistics.items()}


def number_of_blocks(requests: int) -> int:
    """Return the number of blocks into which a run of `requests` requests is split."""
    return max(1, min(BLOCKS, requests // _MIN_BLOCK_REQUESTS))


def _errors(values: Floats, block: NDArray[np.int64], blocks: int) -> dict[str, float | None]:
    """Return standard errors, corrected for the bootstrap variance of k blocks, which is too small by (k − 1) / k."""
    counts = drawn_counts(blocks)
    sizes = counts @ np.bincount(block, minlength=blocks)
    counts, sizes = counts[sizes > 0], sizes[sizes > 0]
    draws = {"mean": counts @ np.bincount(block, values, blocks) / sizes}
    draws |= _percentiles(values, block, counts, sizes)
    widen = (blocks / (blocks - 1)) ** 0.5
    return {name: widen * float(drawn.std()) for name, drawn in draws.items()}


def _percentiles(values: Floats, block: NDArray[np.int64], counts: Floats, sizes: Floats) -> dict[str, Floats]:
    """Return percentiles of each draw: the least threshold that the required number of its values do not exceed."""
    thresholds = np.unique(values)
    if len(thresholds) > _THRESHOLDS:
        thresholds = np.unique(np.quantile(values, np.linspace(0, 1, _THRESHOLDS), method="higher"))
    threshold = np.searchsorted(thresholds, values)
    cells = np.bincount(block * len(thresholds) + threshold, minlength=counts.shape[1] * len(thresholds))
    below = counts @ cells.reshape(-1, len(thresholds)).cumsum(1)
    required = {name: percent / 100 * sizes for name, percent in PERCENTS.items()}
    return {name: thresholds[(below < least[:, None]).sum(1)] for name, least in required.items()}

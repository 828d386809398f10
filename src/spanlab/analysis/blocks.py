"""Mean and percentiles of one long run, with errors by a bootstrap over blocks of consecutive requests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spanlab.analysis.bootstrap import drawn_counts

Floats = NDArray[np.float64]

BLOCKS = 30
PERCENTS = {"p50": 50.0, "p95": 95.0, "p99": 99.0}
_LEAST = 10  # requests of a block
_THRESHOLDS = 2048  # values at which the distribution is counted


class Estimate(NamedTuple):
    """A statistic and its standard error; without one where the run is too short for two blocks."""

    value: float
    error: float | None


def block_estimates(values: Floats) -> dict[str, Estimate] | None:
    """Every statistic of `values`, shape (n,), in order of time; NaN values count nowhere. None where all are NaN.

    Blocks are resampled with replacement (Carlstein 1986): requests that waited for the same thing stay together.
    """
    known = ~np.isnan(values)
    if not known.any():
        return None
    blocks = number_of_blocks(len(values))
    block = np.arange(len(values)) * blocks // len(values)
    values, block = values[known], block[known]
    found = {"mean": float(values.mean())} | {
        name: float(np.percentile(values, percent)) for name, percent in PERCENTS.items()
    }
    errors = _errors(values, block, blocks) if blocks > 1 else dict.fromkeys(found)
    return {name: Estimate(value, errors[name]) for name, value in found.items()}


def number_of_blocks(requests: int) -> int:
    """Blocks that a run of so many requests is cut into."""
    return max(1, min(BLOCKS, requests // _LEAST))


def _errors(values: Floats, block: NDArray[np.int64], blocks: int) -> dict[str, float | None]:
    """Standard errors; the bootstrap's variance of k blocks is too small by (k − 1) / k."""
    counts = drawn_counts(blocks)
    sizes = counts @ np.bincount(block, minlength=blocks)
    kept = counts[sizes > 0], sizes[sizes > 0]
    draws = {"mean": kept[0] @ np.bincount(block, values, blocks) / kept[1]} | _percentiles(values, block, *kept)
    widen = (blocks / (blocks - 1)) ** 0.5
    return {name: widen * float(drawn.std()) for name, drawn in draws.items()}


def _percentiles(values: Floats, block: NDArray[np.int64], counts: Floats, sizes: Floats) -> dict[str, Floats]:
    """Percentiles of each draw: the least threshold that enough of its values do not exceed."""
    thresholds = np.unique(values)
    if len(thresholds) > _THRESHOLDS:
        thresholds = np.unique(np.quantile(values, np.linspace(0, 1, _THRESHOLDS), method="higher"))
    place = np.searchsorted(thresholds, values)
    cells = np.bincount(block * len(thresholds) + place, minlength=counts.shape[1] * len(thresholds))
    below = counts @ cells.reshape(-1, len(thresholds)).cumsum(1)
    wanted = {name: percent / 100 * sizes for name, percent in PERCENTS.items()}
    return {name: thresholds[(below < least[:, None]).sum(1)] for name, least in wanted.items()}

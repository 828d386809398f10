"""How far predicted delays lie from measured ones, and how far the engine's own repeats lie apart."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.analysis.equivalence import bias_interval

#: What is predicted for each request, by the names that `spanlab.study.numbers.summary.delays` gives.
METRICS = ("ttft_s", "tpot_s", "e2e_s")

Delays = dict[str, NDArray[np.float64]]
Measured = NDArray[np.float64]


def errors(measured: list[Delays], predicted: Delays) -> dict[str, Any]:
    """Gap, spread and interval of the bias by metric; `measured` are repeats of the cell that is predicted."""
    found = {}
    for metric in METRICS:
        runs = np.stack([repeat[metric] for repeat in measured])
        known = ~np.isnan(predicted[metric])
        runs, told = runs[:, known], predicted[metric][known]
        found[metric] = _compared(runs, told) if told.size else None
    return found


def _compared(runs: Measured, told: NDArray[np.float64]) -> dict[str, Any]:
    """Gap, spread, and the 90 % interval of the bias over repeats."""
    interval = bias_interval(runs.mean(axis=1), float(told.mean()))
    return {**gap(runs, told), "spread": spread(runs), "bias_interval": interval}


def gap(measured: Measured, predicted: NDArray[np.float64]) -> dict[str, float]:
    """Errors of `predicted`, shape (n,), against `measured`, shape (repeats, n), both in seconds.

    bias      (mean predicted − mean measured) ÷ mean measured, over requests and repeats; `bias_s` undivided
    p95_bias  the same of the 95th percentile, that of each repeat and then their mean
    request   of |predicted − measured| ÷ measured, every request of every repeat: median and 95th percentile; and the
              mean, median and 95th percentile of the undivided
    """
    apart = np.abs(predicted - measured)
    share = apart / measured
    mean, p95 = float(measured.mean()), float(np.percentile(measured, 95, axis=1).mean())
    told_mean, told_p95 = float(predicted.mean()), float(np.percentile(predicted, 95))
    return {
        "measured_mean_s": mean,
        "predicted_mean_s": told_mean,
        "bias": told_mean / mean - 1,
        "bias_s": told_mean - mean,
        "measured_p95_s": p95,
        "predicted_p95_s": told_p95,
        "p95_bias": told_p95 / p95 - 1,
        "p95_bias_s": told_p95 - p95,
        "request_p50": float(np.median(share)),
        "request_p95": float(np.percentile(share, 95)),
        "request_mean_s": float(apart.mean()),
        "request_p50_s": float(np.median(apart)),
        "request_p95_s": float(np.percentile(apart, 95)),
    }


def spread(measured: Measured) -> dict[str, float] | None:
    """What the engine's own repeats differ by (A/A), `measured` of shape (repeats, n); None for a single repeat.

    Over all pairs of repeats a, b: `mean` is the mean of |mean a − mean b| ÷ their mean, `request_p50` and
    `request_p95` are percentiles of |a − b| ÷ (a + b) · 2 over all requests; names ending in `_s` are undivided.
    """
    pairs = list(combinations(measured, 2))
    if not pairs:
        return None
    apart = np.array([np.abs(a - b) for a, b in pairs])
    share = apart / np.array([(a + b) / 2 for a, b in pairs])
    means = np.array([[a.mean(), b.mean()] for a, b in pairs])
    mean_apart = np.abs(means[:, 0] - means[:, 1])
    return {
        "mean": float((mean_apart / means.mean(axis=1)).mean()),
        "mean_s": float(mean_apart.mean()),
        "request_p50": float(np.median(share)),
        "request_p95": float(np.percentile(share, 95)),
        "request_p50_s": float(np.median(apart)),
        "request_p95_s": float(np.percentile(apart, 95)),
    }

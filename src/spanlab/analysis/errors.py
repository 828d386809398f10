"""Errors of predicted delays against measured ones, and the spread of the engine's own repeats (A/A)."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.analysis.equivalence import bias_interval

#: Predicted delays of each request, with the names of `spanlab.study.numbers.summary.delays`.
METRICS = ("ttft_s", "tpot_s", "e2e_s")

Delays = dict[str, NDArray[np.float64]]
Repeats = NDArray[np.float64]


def errors(measured: list[Delays], predicted: Delays) -> dict[str, Any]:
    """Return gap, spread and interval of the bias by metric; `measured` has the repeats of the predicted cell."""
    by_metric = {}
    for metric in METRICS:
        runs = np.stack([repeat[metric] for repeat in measured])
        defined = ~np.isnan(predicted[metric])
        runs, values = runs[:, defined], predicted[metric][defined]
        by_metric[metric] = _errors_of_metric(runs, values) if values.size else None
    return by_metric


def _errors_of_metric(runs: Repeats, predicted: NDArray[np.float64]) -> dict[str, Any]:
    """Return gap, spread, and the 90 % interval of the bias over repeats."""
    interval = bias_interval(runs.mean(axis=1), float(predicted.mean()))
    return {**gap(runs, predicted), "spread": spread(runs), "bias_interval": interval}


def gap(measured: Repeats, predicted: NDArray[np.float64]) -> dict[str, float]:
    """Return errors of `predicted`, shape (n,), against `measured`, shape (repeats, n), both in seconds.

    bias      (mean predicted − mean measured) ÷ mean measured, over requests and repeats; `bias_s` undivided
    p95_bias  the same of the 95th percentile, that of each repeat and then their mean
    request   of |predicted − measured| ÷ measured over every request of every repeat: median and 95th percentile; names
              ending in `_s` are mean, median and 95th percentile of the undivided
    """
    distance = np.abs(predicted - measured)
    relative = distance / measured
    mean, p95 = float(measured.mean()), float(np.percentile(measured, 95, axis=1).mean())
    predicted_mean, predicted_p95 = float(predicted.mean()), float(np.percentile(predicted, 95))
    return {
        "measured_mean_s": mean,
        "predicted_mean_s": predicted_mean,
        "bias": predicted_mean / mean - 1,
        "bias_s": predicted_mean - mean,
        "measured_p95_s": p95,
        "predicted_p95_s": predicted_p95,
        "p95_bias": predicted_p95 / p95 - 1,
        "p95_bias_s": predicted_p95 - p95,
        "request_p50": float(np.median(relative)),
        "request_p95": float(np.percentile(relative, 95)),
        "request_mean_s": float(distance.mean()),
        "request_p50_s": float(np.median(distance)),
        "request_p95_s": float(np.percentile(distance, 95)),
    }


def spread(measured: Repeats) -> dict[str, float] | None:
    """Return differences between the engine's repeats (A/A), `measured` of shape (repeats, n); None for one repeat.

    Over all pairs of repeats a, b: `mean` is the mean of |mean a − mean b| ÷ their mean, `request_p50` and
    `request_p95` are percentiles of |a − b| ÷ (a + b) · 2 over all requests; names ending in `_s` are undivided.
    """
    pairs = list(combinations(measured, 2))
    if not pairs:
        return None
    distance = np.array([np.abs(a - b) for a, b in pairs])
    relative = distance / np.array([(a + b) / 2 for a, b in pairs])
    means = np.array([[a.mean(), b.mean()] for a, b in pairs])
    mean_distance = np.abs(means[:, 0] - means[:, 1])
    return {
        "mean": float((mean_distance / means.mean(axis=1)).mean()),
        "mean_s": float(mean_distance.mean()),
        "request_p50": float(np.median(relative)),
        "request_p95": float(np.percentile(relative, 95)),
        "request_p50_s": float(np.median(distance)),
        "request_p95_s": float(np.percentile(distance, 95)),
    }

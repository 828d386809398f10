"""Errors of predicted times of requests against measured ones."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from spanlab.study.twin.log import Floats, TimedLog, tpot
from spanlab_sim.fitted_server import Times

NS = 1e-9
METRICS = ("ttft", "tpot", "e2e")


def predicted_times(log: TimedLog, times: Times) -> dict[str, Floats]:
    """Return predicted seconds of every request, by metric."""
    ttft_s, e2e_s = times.first_ns * NS - log.arrived_s, times.last_ns * NS - log.arrived_s
    return {"ttft": ttft_s, "tpot": tpot(ttft_s, e2e_s, log.output_lens), "e2e": e2e_s}


def measured_times(log: TimedLog) -> dict[str, Floats]:
    """Return measured seconds of every request, by metric."""
    return {"ttft": log.ttft_s, "tpot": log.tpot_s, "e2e": log.e2e_s}


def errors(
    predicted: Mapping[str, Floats], measured: Mapping[str, Floats], selected: NDArray[np.bool_]
) -> dict[str, dict[str, float | None]]:
    """Return errors over the selected requests by metric: of the mean, and of relative errors per request.

    `mean_error`             predicted ÷ measured mean - 1
    `p50_error`, `p95_error` percentiles of |predicted ÷ measured - 1|
    `bias`                   median of predicted ÷ measured - 1
    Requests without the metric, such as TPOT of one token, are left out; None where all are.
    """
    return {metric: _errors_of_metric(predicted[metric][selected], measured[metric][selected]) for metric in METRICS}


def _errors_of_metric(predicted: Floats, measured: Floats) -> dict[str, float | None]:
    defined = ~np.isnan(measured) & (measured > 0)
    if not defined.any():
        return dict.fromkeys(("mean_error", "p50_error", "p95_error", "bias"))
    predicted, measured = predicted[defined], measured[defined]
    relative = predicted / measured - 1
    middle, most = np.quantile(np.abs(relative), (0.5, 0.95)).tolist()
    return {
        "mean_error": float(predicted.mean() / measured.mean() - 1),
        "p50_error": middle,
        "p95_error": most,
        "bias": float(np.median(relative)),
    }

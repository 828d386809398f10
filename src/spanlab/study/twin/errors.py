"""Errors of predicted times of requests against measured ones, and predictors without a model to compare with."""

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


def predictions_without_model(log: TimedLog) -> dict[str, dict[str, Floats]]:
    """Return predicted seconds of every request by predictor and metric, each fitted to the training requests.

    `line`  least squares over the request's number; for E2E latency, over its number and its output tokens
    `mean`  the training requests' mean
    `last`  the value of the last training request
    A metric without two training requests that have it is predicted as NaN.
    """
    numbers = np.arange(len(log.trains), dtype=np.float64)
    inputs = {"ttft": [numbers], "tpot": [numbers], "e2e": [numbers, log.output_lens.astype(np.float64)]}
    predictions: dict[str, dict[str, Floats]] = {"line": {}, "mean": {}, "last": {}}
    for metric, values in measured_times(log).items():
        trains = log.trains & ~np.isnan(values)
        known = values[trains] if trains.sum() > 1 else np.full(2, np.nan)
        columns = np.stack([np.ones_like(numbers), *inputs[metric]], axis=1)
        predictions["line"][metric] = _least_squares(columns, trains, known)
        predictions["mean"][metric] = np.full_like(numbers, known.mean())
        predictions["last"][metric] = np.full_like(numbers, known[-1])
    return predictions


def _least_squares(columns: Floats, trains: NDArray[np.bool_], known: Floats) -> Floats:
    """Return the fitted values of all requests; NaN if `known` is."""
    if np.isnan(known).any():
        return np.full(len(columns), np.nan)
    fitted: Floats = columns @ np.linalg.lstsq(columns[trains], known, rcond=None)[0]
    return fitted


def errors(
    predicted: Mapping[str, Floats], measured: Mapping[str, Floats], selected: NDArray[np.bool_]
) -> dict[str, dict[str, float | None]]:
    """Return errors over the selected requests by metric: of the mean, and of relative errors per request.

    `mean_error`             predicted ÷ measured mean - 1
    `p50_error`, `p95_error` percentiles of |predicted ÷ measured - 1|
    `bias`                   median of predicted ÷ measured - 1
    Requests without the metric or its prediction, such as TPOT of one token, are left out; None where all are.
    """
    return {metric: _errors_of_metric(predicted[metric][selected], measured[metric][selected]) for metric in METRICS}


def _errors_of_metric(predicted: Floats, measured: Floats) -> dict[str, float | None]:
    defined = ~np.isnan(predicted) & ~np.isnan(measured) & (measured > 0)
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

"""How far predicted times of requests lie from measured ones."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from spanlab.study.twin.log import Floats, TimedLog, tpot
from spanlab_sim.fitted_server import Times

NS = 1e-9
METRICS = ("ttft", "tpot", "e2e")


def predicted(log: TimedLog, times: Times) -> dict[str, Floats]:
    """Seconds of each metric of every request, by metric."""
    ttft_s, e2e_s = times.first_ns * NS - log.arrived_s, times.last_ns * NS - log.arrived_s
    return {"ttft": ttft_s, "tpot": tpot(ttft_s, e2e_s, log.output_lens), "e2e": e2e_s}


def measured(log: TimedLog) -> dict[str, Floats]:
    """Seconds of each metric of every request, by metric."""
    return {"ttft": log.ttft_s, "tpot": log.tpot_s, "e2e": log.e2e_s}


def errors(
    guessed: Mapping[str, Floats], known: Mapping[str, Floats], chosen: NDArray[np.bool_]
) -> dict[str, dict[str, float | None]]:
    """Errors of some requests by metric: of the mean, and percentiles and the mean of relative errors per request.

    `mean_error`             predicted ÷ measured mean - 1
    `p50_error`, `p95_error` percentiles of |predicted ÷ measured - 1|
    `bias`                   median of predicted ÷ measured - 1
    Requests without the metric, such as TPOT of one token, are left out; None where all are.
    """
    return {metric: _of(guessed[metric][chosen], known[metric][chosen]) for metric in METRICS}


def _of(guessed: Floats, known: Floats) -> dict[str, float | None]:
    there = ~np.isnan(known) & (known > 0)
    if not there.any():
        return dict.fromkeys(("mean_error", "p50_error", "p95_error", "bias"))
    guessed, known = guessed[there], known[there]
    relative = guessed / known - 1
    middle, most = np.quantile(np.abs(relative), (0.5, 0.95)).tolist()
    return {
        "mean_error": float(guessed.mean() / known.mean() - 1),
        "p50_error": middle,
        "p95_error": most,
        "bias": float(np.median(relative)),
    }

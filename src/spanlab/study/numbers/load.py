"""One cell, an arm at a load: whether it is stationary, how far it is utilised, its delays."""

from __future__ import annotations

from typing import Any

import numpy as np

from spanlab.analysis.bootstrap import Clusters
from spanlab.report.data import LoadPoint
from spanlab.steady import CLOSED, SATURATED, Run, Stationarity, assess
from spanlab.study.numbers import summary as sums

#: Seeds below which no band is drawn: Student's t of fewer is wider than what it tells.
BAND_SEEDS = 5

Runs = list[dict[str, Any]]


def load_of(columns: sums.Columns, runs: Runs, clients: int | None = None) -> sums.Load:
    """Stationarity and utilisation of one cell; `columns` are all its requests, the warm-up's too.

    `clients`  of a closed loop, which offers no load of its own; None: arrivals wait for nothing
    """
    if clients is not None:
        return sums.Load(Stationarity(CLOSED, None, None, None), None, sums.busy_fraction(runs))
    utilisation = sums.utilisation(columns, runs)
    first = columns["first_token_s"]
    kept = [columns["seed"] == seed for seed in np.unique(columns["seed"])]
    state = assess([Run(columns["arrived_s"][own], first[own]) for own in kept], utilisation)
    return sums.Load(state, utilisation, sums.busy_fraction(runs))


def load_point(name: str, family: str, columns: sums.Columns, runs: Runs) -> LoadPoint:
    """One arm at one load; `columns` are all requests of that load, the warm-up's too."""
    load = load_of(columns, runs)
    counted = sums.select(columns, columns["counted"].astype(bool))
    clusters = Clusters.of(counted["seed"], counted["group_id"])
    delays = sums.delays(counted)
    saturated = load.state.verdict == SATURATED
    queue, ttft = (_band(delays[key], clusters, saturated) for key in ("queue_s", "ttft_s"))
    return LoadPoint(
        arm=name,
        family=family,
        rate_rps=runs[0]["rate_rps"],
        seeds=clusters.seeds,
        requests=len(counted["seed"]),
        state=load.state,
        utilisation=load.utilisation,
        busy_fraction=load.busy_fraction,
        queue_s=queue,
        ttft_s=ttft,
    )


def _band(values: Any, clusters: Clusters, saturated: bool) -> dict[str, float | None]:
    """Mean, its interval and p99; a saturated cell has its mean in `unstable` instead, for drawing."""
    points, interval = sums.spread(values, clusters)
    low, high = interval if interval and clusters.seeds >= BAND_SEEDS else (None, None)
    if saturated:
        return {"mean": None, "low": None, "high": None, "p99": None, "unstable": points["mean"]}
    return {"mean": points["mean"], "low": low, "high": high, "p99": points["p99"], "unstable": None}

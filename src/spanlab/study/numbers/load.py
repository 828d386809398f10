"""Load of one cell (an arm at a load): stationarity, utilisation and delays."""

from __future__ import annotations

from typing import Any

import numpy as np

from spanlab.analysis.bootstrap import Clusters
from spanlab.report.data import LoadPoint
from spanlab.steady import CLOSED, SATURATED, Run, Stationarity, assess
from spanlab.study.numbers import summary as sums

#: Least number of seeds for a band: with fewer, the interval of Student's t is too wide to be useful.
BAND_SEEDS = 5

Runs = list[dict[str, Any]]


def load_of(columns: sums.Columns, runs: Runs, clients: int | None = None) -> sums.Load:
    """Stationarity and utilisation of one cell; `columns` are all its requests, including the warm-up.

    `clients`  number of clients of a closed loop, which has no offered load; None: open loop
    """
    if clients is not None:
        return sums.Load(Stationarity(CLOSED, None, None, None), None, sums.busy_fraction(runs))
    utilisation = sums.utilisation(columns, runs)
    first = columns["first_token_s"]
    seed_masks = [columns["seed"] == seed for seed in np.unique(columns["seed"])]
    state = assess([Run(columns["arrived_s"][seed_mask], first[seed_mask]) for seed_mask in seed_masks], utilisation)
    return sums.Load(state, utilisation, sums.busy_fraction(runs))


def load_point(name: str, family: str, columns: sums.Columns, runs: Runs) -> LoadPoint:
    """Summary of one arm at one load; `columns` are all requests of that load, including the warm-up."""
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
    """Mean, its interval and p99; a saturated cell has only its mean, in `unstable`, for figures."""
    points, interval = sums.spread(values, clusters)
    low, high = interval if interval and clusters.seeds >= BAND_SEEDS else (None, None)
    if saturated:
        return {"mean": None, "low": None, "high": None, "p99": None, "unstable": points["mean"]}
    return {"mean": points["mean"], "low": low, "high": high, "p99": points["p99"], "unstable": None}

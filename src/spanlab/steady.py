"""Stationarity of a simulated queue: a drift test of its length, and the length of its warm-up.

A stable queue has a steady state, and its mean delay is a property of the system. The delays of an
unstable queue grow with the length of the run, so that their mean says how long the run was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]

STEADY, UNSETTLED, SATURATED, TOO_SHORT = "steady", "unsettled", "saturated", "too short"
CLOSED = "closed loop"

#: Blocks of equal time into which one run is cut for the drift test.
BLOCKS = 20
#: Level of the drift test.
ALPHA = 0.01
#: Requests below which a warm-up cannot be told from noise: 20 batches of MSER-5.
SHORTEST = 100
_BATCH = 5


@dataclass(frozen=True)
class Run:
    """Arrivals and first tokens of the requests of one seed, seconds, shape (n,), in any order."""

    arrived_s: Times
    first_token_s: Times


@dataclass(frozen=True)
class Stationarity:
    """Whether a cell (an arm at a load, its seeds pooled) is stationary.

    verdict          `steady`; `unsettled`: the warm-up has no end in the first half of the run;
                     `saturated`: the queue grows, or the offered work exceeds the capacity;
                     `too short`: fewer than 100 arrivals per seed, and no drift that they could show;
                     `closed loop`: arrivals wait for finished requests, so that no queue can grow
    drift_p          p value of the drift test; None without two arrivals at different times
    drift_rps        growth of the queue, requests per second; None as above
    warmup_requests  arrivals that MSER-5 truncates; None where the run is too short
    """

    verdict: str
    drift_p: float | None
    drift_rps: float | None
    warmup_requests: int | None


@dataclass(frozen=True)
class Drift:
    """Growth of a queue in requests per second, and the p value of the test that it is above zero."""

    rate_rps: float
    p: float


def assess(runs: Sequence[Run], utilisation: float | None = None) -> Stationarity:
    """Stationarity of one cell; `runs` are its seeds, `utilisation` its offered work ÷ capacity."""
    drift = drift_test(runs)
    warmup = _warmup(runs)
    overloaded = utilisation is not None and utilisation >= 1
    growing = drift is not None and drift.p < ALPHA
    verdict = SATURATED if overloaded or growing or _at_once(runs) else _settled(runs, warmup)
    p, rate_rps = (drift.p, drift.rate_rps) if drift else (None, None)
    return Stationarity(verdict, p, rate_rps, warmup)


def _at_once(runs: Sequence[Run]) -> bool:
    """Whether several requests come, all of them at one time: no rate, and no steady state."""
    return any(len(run.arrived_s) > 1 and np.ptp(run.arrived_s) == 0 for run in runs)


def _settled(runs: Sequence[Run], warmup: int | None) -> str:
    if warmup is None:
        return TOO_SHORT
    shortest = min(len(run.arrived_s) for run in runs)
    return UNSETTLED if warmup >= _BATCH * (shortest // _BATCH // 2) else STEADY


def _warmup(runs: Sequence[Run]) -> int | None:
    """MSER-5 of the TTFT of the k-th arrival, averaged over the seeds as in Welch's method."""
    shortest = min(len(run.arrived_s) for run in runs)
    if shortest < SHORTEST:
        return None
    series = [_delays(run)[:shortest] for run in runs]
    return mser5(np.mean(series, axis=0))


def _delays(run: Run) -> Times:
    order = np.argsort(run.arrived_s, kind="stable")
    return run.first_token_s[order] - run.arrived_s[order]


def drift_test(runs: Sequence[Run]) -> Drift | None:
    """One-sided t test that the number of requests waiting for their first token grows.

    Tested are the changes of that number over equal blocks of time, from the first arrival to the
    last, those of all seeds together. The number waiting is correlated over hundreds of requests.
    Its changes are not: it is a random walk that is reflected at zero (Lindley's recursion;
    Asmussen, Applied Probability and Queues, 2003, III.6). Below saturation the changes cancel
    out, and the test rejects far less often than its level says. At a load of exactly 1, where no
    steady state exists, each walk ends at |N(0, 1)| standard errors; above it, the sum of the
    changes grows with the length of the run. None where no seed has arrivals at two times.
    """
    changes_by_run = [changes(run) for run in runs if len(run.arrived_s) > 1 and np.ptp(run.arrived_s) > 0]
    if not changes_by_run:
        return None
    grown, counts = sum(values.sum() for values in changes_by_run), np.concatenate(changes_by_run)
    seconds = sum(np.ptp(run.arrived_s) for run in runs)
    return Drift(float(grown / seconds), _p_above_zero(counts))


def changes(run: Run) -> Times:
    """Changes of the number waiting over equal blocks of time: 20, or one per two arrivals."""
    arrived, served = np.sort(run.arrived_s), np.sort(run.first_token_s)
    blocks = max(2, min(BLOCKS, len(arrived) // 2))
    ends = np.linspace(arrived[0], arrived[-1], blocks + 1)
    came = np.searchsorted(arrived, ends, side="right")
    waiting = came - np.searchsorted(served, ends, side="right")
    differences: Times = np.diff(waiting).astype(np.float64)
    return differences


def _p_above_zero(values: Times) -> float:
    """One-sided p value of Student's t test of a mean above zero; equal values leave no doubt."""
    from scipy.special import stdtr  # scipy.stats would cost half a second

    mean, error = values.mean(), values.std(ddof=1) / np.sqrt(values.size)
    if error == 0:
        return 0.0 if mean > 0 else 1.0
    return float(stdtr(values.size - 1, -mean / error))


def mser5(values: Times) -> int:
    """How many values of a series to truncate as its warm-up, a multiple of 5.

    MSER-5 (White, Cobb and Spratt, WSC 2000): of batch means over 5 values, leave out the first d
    such that the variance of the others ÷ their number is least, d up to half of the batches. A
    result of half says that the warm-up did not end.
    """
    batches = len(values) // _BATCH
    means = np.asarray(values[: batches * _BATCH], dtype=np.float64).reshape(batches, _BATCH).mean(1)
    scores = _scores(means)[: batches // 2 + 1]
    equal = (1e-9 * np.abs(means).max(initial=0.0)) ** 2  # what rounding makes of equal means
    return _BATCH * int(np.argmax(scores <= scores.min() + equal))


def _scores(means: Times) -> Times:
    """Variance of means[d:] ÷ their number, for every d; by Welford's update from the end."""
    back, counts = means[::-1], np.arange(1, len(means) + 1)
    average = np.cumsum(back) / counts
    steps = back - np.concatenate([back[:1], average[:-1]])
    squares = np.cumsum(steps**2 * (counts - 1) / counts)
    scores: Times = (squares / counts**2)[::-1]
    return scores

"""Slopes of first and last token times of a simulation by step times, for a fixed schedule.

Infinitesimal perturbation analysis (Ho and Cao, 1983): a request's number of steps is fixed, so its end moves by the
sum of their changes. The start of a request that waits for memory or for `max_num_seqs` moves with the end of the
request that makes room; any other request starts at its arrival.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spanlab.study.twin.log import TimedLog
from spanlab_sim.fitted import FittedTiming
from spanlab_sim.fitted_server import Run, Times

Floats = NDArray[np.float64]


def token_slopes(log: TimedLog, times: Times, timings: Sequence[FittedTiming]) -> Floats:
    """Return nanoseconds by which first and last tokens come later, shape (2, requests, parameters).

    `timings`  the simulated timing, followed by one with each parameter changed
    """
    longer = _cumulative_delays(times.runs, timings)
    starts = np.array([run.start_ns for run in times.runs])
    ends = np.array([run.end_ns for run in times.runs])
    begins, first, last = (
        np.searchsorted(starts, times.admitted_ns),  # the step that computes the first chunk
        np.searchsorted(ends, times.first_ns) + 1,
        np.searchsorted(ends, times.last_ns) + 1,
    )
    arrives = np.searchsorted(starts, log.arrived_s * 1e9)  # the first step that begins after the arrival
    request_by_end = _request_by_end(times)
    moved = np.zeros((2, len(first), longer.shape[1]))
    for index in np.argsort(times.admitted_ns, kind="stable").tolist():
        predecessor = request_by_end.get(int(times.admitted_ns[index])) if begins[index] > arrives[index] + 1 else None
        from_step = arrives[index] if predecessor is None else begins[index]
        before = 0.0 if predecessor is None else moved[1, predecessor]
        moved[0, index] = before + longer[first[index]] - longer[min(from_step, first[index])]
        moved[1, index] = moved[0, index] + longer[last[index]] - longer[first[index]]
    return moved


def _request_by_end(times: Times) -> dict[int, int]:
    """Return one request that ends at each time, by that time."""
    return dict(zip(times.last_ns.tolist(), range(len(times.last_ns)), strict=True))


def _cumulative_delays(runs: Sequence[Run], timings: Sequence[FittedTiming]) -> Floats:
    """Return nanoseconds by which all runs before each run take longer, shape (runs + 1, parameters)."""
    took = np.array([[_duration(timing, run) for timing in timings] for run in runs], dtype=np.float64)
    longer = np.cumsum(took[:, 1:] - took[:, :1], axis=0)
    return np.vstack([np.zeros(longer.shape[1]), longer])


def _duration(timing: FittedTiming, run: Run) -> float:
    """Return nanoseconds of all steps of a run, approximated by its middle step, since durations are nearly linear."""
    middle = (run.repeats - 1) // 2
    ranks = [rank._replace(decode_context=rank.decode_context + middle * rank.num_decodes) for rank in run.ranks]
    return run.repeats * timing.exact(ranks)

"""How first and last tokens of a simulation move when steps take longer, the schedule staying as it is.

Infinitesimal perturbation analysis (Ho and Cao, 1983): a request's steps are counted, so its end moves by what they all
move. One that waits for memory or for a seat moves with the end of the request that makes room; any other starts when
it arrives.
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
    """Nanoseconds by which first and last tokens come later, shape (2, requests, parameters).

    `timings`  as simulated, and then with each parameter changed
    """
    longer = _passed(times.runs, timings)
    starts = np.array([run.start_ns for run in times.runs])
    ends = np.array([run.end_ns for run in times.runs])
    begins, first, last = (
        np.searchsorted(starts, times.admitted_ns),  # the step that computes the first chunk
        np.searchsorted(ends, times.first_ns) + 1,
        np.searchsorted(ends, times.last_ns) + 1,
    )
    arrives = np.searchsorted(starts, log.arrived_s * 1e9)  # the first step that begins after the arrival
    room = _room_made(times)
    moved = np.zeros((2, len(first), longer.shape[1]))
    for at in np.argsort(times.admitted_ns, kind="stable").tolist():
        maker = room.get(int(times.admitted_ns[at])) if begins[at] > arrives[at] + 1 else None
        from_step = arrives[at] if maker is None else begins[at]
        before = 0.0 if maker is None else moved[1, maker]
        moved[0, at] = before + longer[first[at]] - longer[min(from_step, first[at])]
        moved[1, at] = moved[0, at] + longer[last[at]] - longer[first[at]]
    return moved


def _room_made(times: Times) -> dict[int, int]:
    """A request that ends at each time at which one does."""
    return dict(zip(times.last_ns.tolist(), range(len(times.last_ns)), strict=True))


def _passed(runs: Sequence[Run], timings: Sequence[FittedTiming]) -> Floats:
    """Nanoseconds by which all runs before each one take longer, shape (runs + 1, parameters)."""
    took = np.array([[_duration(timing, run) for timing in timings] for run in runs], dtype=np.float64)
    longer = np.cumsum(took[:, 1:] - took[:, :1], axis=0)
    return np.vstack([np.zeros(longer.shape[1]), longer])


def _duration(timing: FittedTiming, run: Run) -> float:
    """Nanoseconds of all steps of a run, each as long as the middle one: durations are all but a straight line."""
    middle = (run.repeats - 1) // 2
    ranks = [one._replace(decode_context=one.decode_context + middle * one.num_decodes) for one in run.ranks]
    return run.repeats * timing.exact(ranks)

"""Observed times of a server's log: queueing, scheduling, first and last token of each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]
#: Clocks closer than this are the same clock; a server's monotonic clock differs from the date by years.
SAME_CLOCK_S = 600.0


class Moments(NamedTuple):
    """Times of one request in seconds on the server's clock; NaN if unknown."""

    queued: float = np.nan
    scheduled: float = np.nan
    first_token: float = np.nan
    last_token: float = np.nan


UNKNOWN = Moments()


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """Observed times of all requests, float64 seconds since the first arrival, in the order of the log's requests.

    `lines`  int64, line of each request in the file
    `notes`  notes about changes to the clocks
    """

    queued: Seconds
    scheduled: Seconds
    first_token: Seconds
    last_token: Seconds
    lines: NDArray[np.int64]
    notes: tuple[str, ...] = ()


def align_times(arrived: Seconds, moments: NDArray[np.float64], lines: NDArray[np.int64]) -> Observed | None:
    """Convert moments of shape (requests, 4) to the clock of arrivals; None if the log has no such times.

    Different clocks are aligned by the smallest delay from arrival to queueing, which then counts as zero.
    """
    if np.isnan(moments).all() or np.isnan(arrived).any():
        return None
    delays = moments[:, 0] - arrived
    delay = float(np.nanmin(delays)) if not np.isnan(delays).all() else 0.0
    if abs(delay) < SAME_CLOCK_S:
        queued, scheduled, first, last = (moments - arrived[0]).T
        return Observed(queued, scheduled, first, last, lines)
    note = (
        "arrivals and tokens have clocks of their own: they are aligned by the smallest delay from arrival to queue, "
        "which counts as none"
    )
    queued, scheduled, first, last = (moments - delay - arrived[0]).T
    return Observed(queued, scheduled, first, last, lines, (note,))

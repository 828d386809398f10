"""When requests of a server's log were queued and scheduled, and when their first and last tokens came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]
#: Clocks that agree to so many seconds are one clock; a server's monotonic clock differs from the date by years.
SAME_CLOCK_S = 600.0


class Moments(NamedTuple):
    """Times of one request in seconds on the server's clock; NaN where the log does not say."""

    queued: float = np.nan
    scheduled: float = np.nan
    first_token: float = np.nan
    last_token: float = np.nan


UNKNOWN = Moments()


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """Moments of all requests, float64 seconds since the first arrival, in the order of the log's requests.

    `lines`  int64, where each request stands in the file
    `notes`  what was done to the clocks, in words
    """

    queued: Seconds
    scheduled: Seconds
    first_token: Seconds
    last_token: Seconds
    lines: NDArray[np.int64]
    notes: tuple[str, ...] = ()


def observed(arrived: Seconds, moments: NDArray[np.float64], lines: NDArray[np.int64]) -> Observed | None:
    """Times of shape (requests, 4) on the clock of arrivals; None where the log has none.

    Two clocks are aligned by the smallest delay between arrival and queue, which then counts as zero.
    """
    if np.isnan(moments).all() or np.isnan(arrived).any():
        return None
    delays = moments[:, 0] - arrived
    delay = float(np.nanmin(delays)) if not np.isnan(delays).all() else 0.0
    if abs(delay) < SAME_CLOCK_S:
        queued, scheduled, first, last = (moments - arrived[0]).T
        return Observed(queued, scheduled, first, last, lines)
    said = (
        "arrivals and tokens have clocks of their own: they are aligned by the smallest delay from arrival to queue, "
        "which counts as none"
    )
    queued, scheduled, first, last = (moments - delay - arrived[0]).T
    return Observed(queued, scheduled, first, last, lines, (said,))

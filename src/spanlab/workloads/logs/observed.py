"""What a server observed of each request: times of queueing, scheduling, first and last token, and counts of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]
#: Clocks closer than this are the same clock; a server's monotonic clock differs from the date by years.
SAME_CLOCK_S = 600.0
#: No request takes longer than this: 30 days.
LONGEST_REQUEST_S = 30 * 86_400.0


class Moments(NamedTuple):
    """Times of one request in seconds on the server's clock; NaN if unknown."""

    queued: float = np.nan
    scheduled: float = np.nan
    first_token: float = np.nan
    last_token: float = np.nan


UNKNOWN = Moments()


class Usage(NamedTuple):
    """Reported tokens of one request, NaN where the server reports none.

    `prompt`  all tokens of the prompt, cached ones included
    `cached`  those that came from a cache
    """

    prompt: float = np.nan
    cached: float = np.nan


NOT_REPORTED = Usage()


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """Observed times of all requests, float64 seconds since the first arrival, in the order of the log's requests.

    `lines`       int64, line of each request in the file
    `own_clock`   whether tokens had a clock of their own, which was aligned with that of arrivals
    `notes`       notes about changes to the clocks
    """

    queued: Seconds
    scheduled: Seconds
    first_token: Seconds
    last_token: Seconds
    lines: NDArray[np.int64]
    own_clock: bool = False
    notes: tuple[str, ...] = ()

    def aligned_by(self, arrived: Seconds, selected: NDArray[np.bool_]) -> Observed:
        """Return the times with clocks aligned by the selected requests only, for fits that see no others.

        `arrived`, `selected` have shape (requests,). ValueError if no selected request has a time of queueing.
        """
        if not self.own_clock:
            return self
        delays = (self.queued - arrived)[selected]
        if np.isnan(delays).all():
            raise ValueError("queued_ts: expected a time for one of the fitted requests, and all are missing")
        times = (self.queued, self.scheduled, self.first_token, self.last_token)
        queued, scheduled, first, last = (values - np.nanmin(delays) for values in times)
        return Observed(queued, scheduled, first, last, self.lines, True, (_note("the fitted"),))


def _note(requests: str) -> str:
    smallest = f"the smallest delay from arrival to queue of {requests} requests"
    return f"arrivals and tokens have clocks of their own: they are aligned by {smallest}, which counts as none"


def align_times(
    arrived: Seconds, moments: NDArray[np.float64], lines: NDArray[np.int64], subject: str = "log"
) -> Observed | None:
    """Convert moments of shape (requests, 4) to the clock of arrivals; None if the log has no such times.

    Different clocks are aligned by the smallest delay from arrival to queueing, which then counts as zero. Raises
    ValueError, beginning with `subject`, for a time that is days away from the request's arrival.
    """
    if np.isnan(moments).all() or np.isnan(arrived).any():
        return None
    delays = moments[:, 0] - arrived
    delay = float(np.nanmin(delays)) if not np.isnan(delays).all() else 0.0
    own_clock = abs(delay) >= SAME_CLOCK_S
    aligned = moments - (delay if own_clock else 0.0)
    away = np.abs(aligned - arrived[:, None]) > LONGEST_REQUEST_S
    if away.any():
        request, column = np.argwhere(away)[0]
        raise ValueError(
            f"{subject}, line {lines[request]}: {Moments._fields[column]}_ts: expected a time within "
            f"{LONGEST_REQUEST_S / 86_400:g} days of the request's arrival, not {moments[request, column]:g}"
        )
    queued, scheduled, first, last = (aligned - arrived[0]).T
    return Observed(queued, scheduled, first, last, lines, own_clock, (_note("all"),) if own_clock else ())

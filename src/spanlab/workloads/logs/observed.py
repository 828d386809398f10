"""What a server observed and counted of the requests of a log, and what a reader left out of
them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# ------------------------------------------------------------------------------
# What a server observed of each request: times of queueing, scheduling, first and last token,
# and counts of tokens.
# ------------------------------------------------------------------------------

Seconds = NDArray[np.float64]
#: Clocks closer than this are the same clock; a server's monotonic clock differs from the date by
#: years.
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

    `prompt`   all tokens of the prompt, cached and created ones included
    `cached`   those that came from a cache
    `created`  those that were written into a cache, where a provider counts them apart
    """

    prompt: float = np.nan
    cached: float = np.nan
    created: float = np.nan


NOT_REPORTED = Usage()
# of text without a tokenizer: close to the ratio of large vocabularies for English
BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """Observed times of all requests, float64 seconds since the first arrival, in the order of the
    log's requests.

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
        """Return the times with clocks aligned by the selected requests only, for fits that see no
        others.

        `arrived`, `selected` have shape (requests,). ValueError if no selected request has a time
        of queueing.
        """
        if not self.own_clock:
            return self
        delays = (self.queued - arrived)[selected]
        if np.isnan(delays).all():
            raise ValueError(
                "queued_ts: expected a time for one of the fitted requests, and all are missing"
            )
        times = (self.queued, self.scheduled, self.first_token, self.last_token)
        queued, scheduled, first, last = (values - np.nanmin(delays) for values in times)
        return Observed(queued, scheduled, first, last, self.lines, True, (_note("the fitted"),))


def _note(requests: str) -> str:
    smallest = f"the smallest delay from arrival to queue of {requests} requests"
    return f"arrivals and tokens have clocks of their own: they are aligned by {smallest}, which counts as none"


def away_from_arrival(moment: float) -> str:
    """Return what is expected in place of a time that is days away from its request's arrival."""
    return f"a time within {LONGEST_REQUEST_S / 86_400:g} days of the request's arrival, not {moment:g}"


def align_times(
    arrived: Seconds, moments: NDArray[np.float64], lines: NDArray[np.int64], subject: str = "log"
) -> Observed | None:
    """Convert moments of shape (requests, 4) to the clock of arrivals; None if the log has no such
    times.

    Different clocks are aligned by the smallest delay from arrival to queueing, which then counts
    as zero. Raises ValueError, beginning with `subject`, for a time that is days away from the
    request's arrival.
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
        expected = away_from_arrival(moments[request, column])
        raise ValueError(
            f"{subject}, line {lines[request]}: {Moments._fields[column]}_ts: expected {expected}"
        )
    queued, scheduled, first, last = (aligned - arrived[0]).T
    return Observed(
        queued, scheduled, first, last, lines, own_clock, (_note("all"),) if own_clock else ()
    )


# ------------------------------------------------------------------------------
# What a reader of a log left out of the prompts: the place where every format counts it.
# ------------------------------------------------------------------------------

#: A conclusion about a whole log needs a smaller unread share than this.
MOST_UNREAD = 0.01


@dataclass
class Unread:
    """Bytes of a log that became tokens, and bytes that did not, by name of the part.

    `read`       bytes that became tokens or lengths
    `left`       bytes left out, by part: a key of a body, bad lines by their field
    `places`     number of times that each part was left out
    `requests`   requests that were read; `endless` are those with a part whose tokens the log does
                 not determine
    `withheld`   requests of which the log has lengths only
    """

    read: int = 0
    left: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    endless: int = 0
    withheld: int = 0

    def take(self, size: int) -> None:
        """Count bytes that became tokens."""
        self.read += size

    def leave(self, name: str, size: int) -> None:
        """Count bytes of a named part that were left out; `name` is a plural or a key."""
        self.left[name] += size
        self.places[name] += 1

    def finish(self, *, endless: bool = False) -> None:
        """Count a request; `endless` if its tokens are unknown whatever the bytes of the part, as
        of an image's URL."""
        self.requests += 1
        self.endless += endless

    def withhold(self) -> None:
        """Count a request whose content the log does not have."""
        self.finish(endless=True)
        self.withheld += 1

    def mark_endless(self, before: int) -> None:
        """Count the last request as one of unknown length, unless it made `endless` larger than
        `before`."""
        self.endless += self.endless == before

    def clear(self) -> None:
        """Forget all counts, since the log is read again."""
        self.read, self.requests, self.endless, self.withheld = 0, 0, 0, 0
        self.left.clear()
        self.places.clear()

    @property
    def seen(self) -> int:
        """Bytes that were read or left out."""
        return self.read + self.left.total()

    @property
    def share(self) -> float:
        """Share of the log that is unknown: of its bytes, or of its requests where their bytes say
        nothing."""
        return max(self.left.total() / max(self.seen, 1), self.endless / max(self.requests, 1))

    @property
    def allows_verdict(self) -> bool:
        """Whether so little is unknown that a conclusion about the whole log stands."""
        return self.share <= MOST_UNREAD

    @property
    def reason(self) -> str:
        """Say how much is unknown, as the reason why no conclusion stands."""
        requests = f"the tokens of {self.endless:,} of {self.requests:,} requests are unknown"
        size = f"{100 * self.left.total() / max(self.seen, 1):.1f} % of the bytes of its prompts were left out"
        return " and ".join(
            [size] * bool(self.left or not self.endless) + [requests] * bool(self.endless)
        )

    def describe(self) -> str:
        """Name the parts that were left out, the largest first, in one clause."""
        parts = [
            f"{name} ({self.places[name]:,} times, {size:,} bytes, {100 * size / max(self.seen, 1):.1f} %)"
            for name, size in self.left.most_common()
        ]
        return ", ".join(parts)

    def notes(self) -> tuple[str, ...]:
        """Return the caveat about what was left out; none if everything was read."""
        if not self.left:
            return ()
        unknown = (
            f"; the tokens of {self.endless:,} of {self.requests:,} requests are unknown"
            if self.endless
            else ""
        )
        return (f"left out of {self.seen:,} bytes of prompts: {self.describe()}{unknown}",)


@dataclass
class Counters:
    """Tokens by a server's own counters, which begin again at 0 when it is started anew.

    `prompt`, `cached`  tokens of the prompts between the first and the last reading, and cached
                        ones
    """

    prompt: int = 0
    cached: int = 0
    _last: tuple[int, int] | None = None

    def add(self, prompt: float | None, cached: float | None) -> None:
        """Take a reading of both counters; None: it has none."""
        if prompt is None or cached is None:
            return
        now = int(prompt), int(cached)
        if self._last is not None:
            before = self._last if now[0] >= self._last[0] and now[1] >= self._last[1] else (0, 0)
            self.prompt += now[0] - before[0]
            self.cached += now[1] - before[1]
        self._last = now

    def lines(self) -> list[str]:
        """Return the sentence about the counters; none without a prompt."""
        share = f"{self.cached:,} of {self.prompt:,} prompt tokens were cached"
        return (
            [f"by the server's own counters, {share} ({100 * self.cached / self.prompt:.1f} %)"]
            if self.prompt
            else []
        )

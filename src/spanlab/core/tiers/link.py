"""A link whose transfers in flight share its bandwidth equally: processor sharing, in whole nanoseconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from heapq import heappop, heappush

Due = list[tuple[float, int, "Transfer"]]  # a heap; the number keeps the order of equal ones


@dataclass(slots=True, eq=False)
class Transfer:
    """Bytes in flight. `ends_at` is when the last byte arrives if no other transfer begins before."""

    num_bytes: int
    begun_at: int
    ends_at: int = -1


@dataclass(slots=True)
class _Flow:
    """Transfers in flight at the last event.

    `time`     time of the last event in nanoseconds, not rounded
    `served`   bytes delivered to each transfer that has shared the bandwidth from the start
    `joining`  transfers in their latency, by its end
    `sharing`  transfers that move, by the value of `served` at their end
    """

    ns_per_byte: float
    time: float = 0.0
    served: float = 0.0
    joining: Due = field(default_factory=list)
    sharing: Due = field(default_factory=list)
    area: float = 0.0  # transfers in flight, times nanoseconds

    def copy(self) -> _Flow:
        return _Flow(self.ns_per_byte, self.time, self.served, self.joining.copy(), self.sharing.copy())

    def __len__(self) -> int:
        return len(self.joining) + len(self.sharing)

    def first_end(self) -> float:
        """Return when the first of the moving transfers ends, if none joins before."""
        if not self.sharing:
            return math.inf
        return self.time + (self.sharing[0][0] - self.served) * len(self.sharing) * self.ns_per_byte

    def move_to(self, until: float) -> None:
        """Advance time without an event."""
        if self.sharing and self.ns_per_byte:
            self.served += (until - self.time) / (len(self.sharing) * self.ns_per_byte)
        self._pass(until)

    def _pass(self, until: float) -> None:
        self.area += len(self) * (until - self.time)
        self.time = until

    def next_event(self, until: float) -> tuple[bool, Transfer | None]:
        """Process the next join or end up to `until`: whether there was one, and the transfer that has ended."""
        join, end = self.joining[0][0] if self.joining else math.inf, self.first_end()
        if not len(self) or min(join, end) > until:
            return False, None
        if end <= join:
            self._pass(end)
            self.served, _, ended = heappop(self.sharing)
            return True, ended
        self.move_to(join)
        _, number, joined = heappop(self.joining)
        heappush(self.sharing, (self.served + joined.num_bytes, number, joined))
        return True, None


class Link:
    """Moves bytes at a bandwidth that all transfers in flight share equally; each waits for the latency first.

    A transfer ends in the first whole nanosecond in which all of its bytes are there. `bytes_per_s` may be infinite.
    """

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self._latency_ns = round(latency_s * 1e9)
        self._flow = _Flow(1e9 / bytes_per_s)
        self._ended: list[Transfer] = []
        self._begun = 0
        self._ends_known = True  # whether `ends_at` of those in flight is up to date

    def begin(self, num_bytes: int, now: int) -> Transfer:
        """Begin a transfer; `now` never decreases."""
        self._run(now)
        self._flow.move_to(now)
        transfer = Transfer(num_bytes, now)
        self._begun += 1
        heappush(self._flow.joining, (now + self._latency_ns, self._begun, transfer))
        self._ends_known = False
        return transfer

    def advance(self, now: int) -> list[Transfer]:
        """Return the transfers that have ended by now and were not returned before, in order."""
        self._run(now)
        ended, self._ended = self._ended, []
        return ended

    def _run(self, now: int) -> None:
        self._ended += _run(self._flow, now)

    def ends_at(self, transfer: Transfer) -> int:
        """Return when a transfer ends if no other begins before."""
        if not self._ends_known:
            _run(self._flow.copy(), math.inf)
            self._ends_known = True
        return transfer.ends_at

    def delay(self, num_bytes: int) -> int:
        """Return the nanoseconds of a further transfer at the share of the bandwidth that it would get now."""
        return self._latency_ns + math.ceil(num_bytes * (len(self._flow) + 1) * self._flow.ns_per_byte)

    def mean_in_flight(self, now: int) -> float:
        """Return the mean number of transfers in flight over the time from zero to `now`."""
        return (self._flow.area + len(self._flow) * (now - self._flow.time)) / now if now else 0.0


def _run(flow: _Flow, until: float) -> list[Transfer]:
    """Process every event up to a time; returns the transfers that end."""
    ended = []
    happened = True
    while happened:
        happened, transfer = flow.next_event(until)
        if transfer is not None:
            transfer.ends_at = math.ceil(flow.time)
            ended.append(transfer)
    return ended

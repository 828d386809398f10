"""A link whose transfers in flight share its bandwidth equally: processor sharing, in whole nanoseconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from heapq import heappop, heappush

Due = list[tuple[float, int, "LinkTransfer"]]  # a heap; the number keeps the order of equal ones


@dataclass(slots=True, eq=False)
class LinkTransfer:
    """Bytes on their way. `ends_at` is when the last one arrives if nothing else begins before."""

    num_bytes: int
    begun_at: int
    ends_at: int = -1


@dataclass(slots=True)
class _Flow:
    """Transfers in flight at the last event.

    `at`       time of the last event in nanoseconds; fluid, so no whole number
    `served`   bytes that each transfer which shared the bandwidth all along has got
    `joining`  transfers in their latency, by its end
    `sharing`  transfers that move, by the value of `served` at their end
    """

    ns_per_byte: float
    at: float = 0.0
    served: float = 0.0
    joining: Due = field(default_factory=list)
    sharing: Due = field(default_factory=list)
    area: float = 0.0  # transfers in flight, times nanoseconds

    def copy(self) -> _Flow:
        return _Flow(self.ns_per_byte, self.at, self.served, self.joining.copy(), self.sharing.copy())

    def __len__(self) -> int:
        return len(self.joining) + len(self.sharing)

    def first_end(self) -> float:
        """When the first of those that move ends, if none joins before."""
        if not self.sharing:
            return math.inf
        return self.at + (self.sharing[0][0] - self.served) * len(self.sharing) * self.ns_per_byte

    def move_to(self, time: float) -> None:
        """Let time pass without an event."""
        if self.sharing and self.ns_per_byte:
            self.served += (time - self.at) / (len(self.sharing) * self.ns_per_byte)
        self._pass(time)

    def _pass(self, time: float) -> None:
        self.area += len(self) * (time - self.at)
        self.at = time

    def next_event(self, until: float) -> tuple[bool, LinkTransfer | None]:
        """The next join or end up to `until`: whether there was one, and the transfer that has ended."""
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
        self._ended: list[LinkTransfer] = []
        self._begun = 0
        self._foreseen = True  # whether `ends_at` of those in flight is up to date

    def begin(self, num_bytes: int, now: int) -> LinkTransfer:
        """Let a transfer begin; `now` never goes back."""
        self._run(now)
        self._flow.move_to(now)
        transfer = LinkTransfer(num_bytes, now)
        self._begun += 1
        heappush(self._flow.joining, (now + self._latency_ns, self._begun, transfer))
        self._foreseen = False
        return transfer

    def advance(self, now: int) -> list[LinkTransfer]:
        """Transfers that have ended by now and were not returned before, in order."""
        self._run(now)
        ended, self._ended = self._ended, []
        return ended

    def _run(self, now: int) -> None:
        self._ended += _run(self._flow, now)

    def ends_at(self, transfer: LinkTransfer) -> int:
        """When a transfer ends if nothing else begins before."""
        if not self._foreseen:
            _run(self._flow.copy(), math.inf)
            self._foreseen = True
        return transfer.ends_at

    def delay(self, num_bytes: int) -> int:
        """Nanoseconds that a further transfer takes at the share that it would get at present."""
        return self._latency_ns + math.ceil(num_bytes * (len(self._flow) + 1) * self._flow.ns_per_byte)

    def mean_in_flight(self, now: int) -> float:
        """Transfers in flight, mean over the time from zero to `now`."""
        return (self._flow.area + len(self._flow) * (now - self._flow.at)) / now if now else 0.0


def _run(flow: _Flow, until: float) -> list[LinkTransfer]:
    """Let every event up to a time happen; returns the transfers that end."""
    ended = []
    happened = True
    while happened:
        happened, transfer = flow.next_event(until)
        if transfer is not None:
            transfer.ends_at = math.ceil(flow.at)
            ended.append(transfer)
    return ended

"""Arrival processes: they return the requests with arrival times, in order of arrival.

Every kind is a pure function of the requests, of a fresh Generator if it draws, and of its keys. It
returns Requests sorted by `arrived_at`, integer nanoseconds, with unchanged ids. Unit-rate draws
are divided by the rate, so one seed gives one sample path that another rate only stretches: loads
and policies are compared under common random numbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.core.protocol import novel_requests
from spanlab.core.request import Request
from spanlab.kinds import Kind, Kinds, check_fields, field
from spanlab.registry import REQUIRED, not_negative, positive

Times = NDArray[np.float64]
ORDERS = ("shuffled", "as_given", "by_group")
_LATEST_S = 9e9  # largest time that integer nanoseconds hold, about 285 years
_ORDER = "order of requests: shuffled, as_given (the workload's) or by_group"
_CLIENTS = "maximum requests in flight: the next one arrives when one finishes"


@dataclass
class Arrivals(Kind):
    """The arrival process: one of the kinds below, each with keys of its own."""

    def __post_init__(self) -> None:
        check_fields(self, "arrivals")

    def arrive(self, requests: Sequence[Request], rng: np.random.Generator) -> list[Request]:
        """Return the requests with arrival times, in order of arrival."""
        raise NotImplementedError  # every kind has its own

    @property
    def draws(self) -> bool:
        """Whether the requests depend on the seed."""
        return True

    @property
    def keeps_order(self) -> bool:
        """Whether requests wait for those that they name in `after`; other kinds have times
        alone."""
        return False

    @property
    def rate_rps(self) -> float | None:
        """Rate of a kind that has one."""
        return None

    @property
    def order(self) -> str | None:
        """Order of the requests, for a kind that has one."""
        return None

    @property
    def clients(self) -> int | None:
        """Maximum requests in flight, for a closed loop."""
        return None

    def at_rate(self, rate_rps: float | None) -> Arrivals:
        """Return the same process at another rate; None: at its own."""
        changes: Any = {} if rate_rps is None else {"rate_rps": rate_rps}
        return replace(self, **changes)


ARRIVALS: Kinds[Arrivals] = Kinds("arrivals", Arrivals)


@dataclass
@ARRIVALS.register("poisson")
class Poisson(Arrivals):
    """One Poisson process for the whole system: independent exponential gaps with mean 1 /
    rate_rps."""

    rate_rps: float = field(REQUIRED, positive, "mean rate, requests per second", example=8.0)
    order: str | None = field(None, ORDERS, f"{_ORDER}; null: shuffled", example="shuffled")

    def arrive(self, requests: Sequence[Request], rng: np.random.Generator) -> list[Request]:
        gaps = rng.standard_exponential(len(requests))
        return _system_wide(requests, rng, gaps, self.rate_rps, self.order)


@dataclass
@ARRIVALS.register("gamma")
class Gamma(Arrivals):
    """Independent Gamma gaps, mean 1 / rate_rps, squared coefficient of variation 1 / burstiness (1
    is Poisson).

    The shape is vLLM's `burstiness`. vLLM's benchmark then rescales the gaps so that the last
    request arrives at exactly n / rate; here they stay as drawn, because a fixed total takes away
    the very fluctuation of the load that makes queues.
    """

    rate_rps: float = field(REQUIRED, positive, "mean rate, requests per second", example=8.0)
    burstiness: float = field(
        REQUIRED, positive, "shape of the gaps' distribution; below 1: bursts", example=0.25
    )
    order: str | None = field(None, ORDERS, f"{_ORDER}; null: shuffled", example="shuffled")

    def arrive(self, requests: Sequence[Request], rng: np.random.Generator) -> list[Request]:
        gaps = rng.standard_gamma(self.burstiness, len(requests)) / self.burstiness
        return _system_wide(requests, rng, gaps, self.rate_rps, self.order)


@dataclass
@ARRIVALS.register("deterministic")
class Deterministic(Arrivals):
    """Equal gaps of 1 / rate_rps, one of them before the first request, as in the random kinds."""

    rate_rps: float = field(REQUIRED, positive, "rate, requests per second", example=8.0)
    order: str | None = field(None, ORDERS, f"{_ORDER}; null: shuffled", example="shuffled")

    @property
    def draws(self) -> bool:
        return self.order != "as_given"

    def arrive(self, requests: Sequence[Request], rng: np.random.Generator) -> list[Request]:
        return _system_wide(requests, rng, np.ones(len(requests)), self.rate_rps, self.order)


@dataclass
@ARRIVALS.register("saturating")
class Saturating(Arrivals):
    """All requests at time zero: what is served then per second is the most that can be."""

    order: str | None = field(None, ORDERS, f"{_ORDER}; null: shuffled")

    def arrive(self, requests: Sequence[Request], rng: np.random.Generator) -> list[Request]:
        return _system_wide(requests, rng, np.zeros(len(requests)), 1.0, self.order)


@dataclass
@ARRIVALS.register("poisson_per_group")
class PoissonPerGroup(Arrivals):
    """Each group asks its requests in their order, by a Poisson process of its own with rate_rps.

    Groups draw from spawned generators, so one group's length does not shift another's arrivals.
    """

    rate_rps: float = field(REQUIRED, positive, "mean rate of each group, requests per second")

    def arrive(self, requests: Sequence[Request], rng: np.random.Generator) -> list[Request]:
        ordered: list[Request] = []
        unit: list[Times] = []
        groups = by_group(requests)
        for members, group_rng in zip(groups.values(), rng.spawn(len(groups)), strict=True):
            ordered += members
            unit.append(np.cumsum(group_rng.standard_exponential(len(members))))
        return with_arrival_times(ordered, np.concatenate([np.empty(0), *unit]) / self.rate_rps)


@dataclass
@ARRIVALS.register("closed_loop")
class ClosedLoop(Arrivals):
    """A fixed number of requests in flight, one per client: the next one arrives when one of them
    finishes.

    All requests are ready at time zero; `serve` holds back all but `clients` of them.
    """

    clients: int = field(REQUIRED, positive, _CLIENTS, example=1)
    order: str | None = field(None, ORDERS, f"{_ORDER}; null: by_group")

    @property
    def draws(self) -> bool:
        return self.order != "as_given"

    def arrive(self, requests: Sequence[Request], rng: np.random.Generator) -> list[Request]:
        check_unique(requests)
        ordered = _ordered(requests, rng, self.order or "by_group")
        return [replace(request, arrived_at=0) for request in ordered]


@dataclass
@ARRIVALS.register("as_given")
class AsGiven(Arrivals):
    """The arrival times that the requests carry, from a trace; equal times keep their order."""

    @property
    def draws(self) -> bool:
        return False

    def arrive(self, requests: Sequence[Request], rng: np.random.Generator) -> list[Request]:
        check_unique(requests)
        return sorted(requests, key=lambda request: request.arrived_at)


@dataclass
@ARRIVALS.register("interleaved_legacy")
class InterleavedLegacy(Arrivals):
    """The order of the published sparse-prefix study, draw for draw: its rows interleaved at one
    fixed load.

    Groups, in order of first appearance, are shuffled; each draws its first arrival from
    exponential(1 s); then the group with the least arrival, the earlier shuffled one on a tie,
    emits its next row and adds an exponential(1 s). Only NumPy's legacy generator gives those
    draws, hence a seed of its own.
    """

    seed: int | None = field(None, not_negative, "seed of the draws; null: 42, as published")

    @property
    def draws(self) -> bool:
        return False

    def arrive(self, requests: Sequence[Request], rng: np.random.Generator) -> list[Request]:
        check_unique(requests)
        legacy = np.random.RandomState(42 if self.seed is None else self.seed)
        groups = list(by_group(requests).values())
        legacy.shuffle(groups)  # type: ignore[arg-type]
        heap = [(float(legacy.exponential(1.0)), rank, 0) for rank in range(len(groups))]
        heapq.heapify(heap)
        emitted: list[Request] = []
        while heap:
            arrival_s, rank, row = heapq.heappop(heap)
            emitted.append(replace(groups[rank][row], arrived_at=round(arrival_s * 1e9)))
            if row + 1 < len(groups[rank]):
                following = arrival_s + float(legacy.exponential(1.0))
                heapq.heappush(heap, (following, rank, row + 1))
        return emitted


def resample(
    requests: Sequence[Request], n: int, zipf_exponent: float, rng: np.random.Generator
) -> list[Request]:
    """Draw n requests with replacement, groups by Zipf popularity and requests uniformly within;
    fresh ids 0 to n − 1.

    The group of rank r is drawn with probability proportional to r^−zipf_exponent (0: all alike);
    which group has which rank is drawn first. Drawn in the order in which they are to be asked, so
    pair it with order="as_given".
    """
    if n < 1 or not requests:
        raise ValueError(
            f"popularity.n is {n} with {len(requests)} requests to draw from, expected both positive."
        )
    if any(request.after for request in requests):
        raise ValueError(
            f"popularity.n is {n} where requests wait for others, expected every request once."
        )
    if not (zipf_exponent >= 0 and np.isfinite(zipf_exponent)):
        raise ValueError(f"popularity.zipf_exponent is {zipf_exponent}, expected 0 or more.")
    groups = list(by_group(requests).values())
    by_rank = rng.permutation(len(groups))
    weights = np.arange(1, len(groups) + 1, dtype=np.float64) ** -zipf_exponent
    ranks = rng.choice(len(groups), size=n, p=weights / weights.sum())
    drawn = [groups[group] for group in by_rank[ranks].tolist()]
    shares = rng.random(n).tolist()
    return [
        replace(members[int(share * len(members))], id=i)
        for i, (members, share) in enumerate(zip(drawn, shares, strict=True))
    ]


def _system_wide(
    requests: Sequence[Request],
    rng: np.random.Generator,
    unit_gaps: Times,
    rate_rps: float,
    order: str | None,
) -> list[Request]:
    # The gaps were drawn before the order, so all orders see the same arrival times.
    ordered = _ordered(requests, rng, order or "shuffled")
    return with_arrival_times(ordered, np.cumsum(unit_gaps) / rate_rps)


def _ordered(
    requests: Sequence[Request], rng: np.random.Generator, order: str
) -> Sequence[Request]:
    """Return the requests in an order; `by_group`: groups in random order, requests of a group in
    theirs."""
    if order == "as_given":
        return requests
    by_groups = order == "by_group"
    groups = list(by_group(requests).values()) if by_groups else [[request] for request in requests]
    return [request for index in rng.permutation(len(groups)).tolist() for request in groups[index]]


def with_arrival_times(requests: Sequence[Request], arrivals_s: Times) -> list[Request]:
    """Return the requests with these arrival times, in order of arrival."""
    check_unique(requests)
    if len(arrivals_s) and not arrivals_s.max() < _LATEST_S:
        raise ValueError(
            f"arrivals.rate_rps: the last request would arrive after {arrivals_s.max():.3g} s; expected more"
        )
    arrivals_ns = np.rint(arrivals_s * 1e9).astype(np.int64)
    # Stable: at equal times the earlier in the list comes first, always.
    by_time = np.argsort(arrivals_ns, kind="stable").tolist()
    stamps = arrivals_ns.tolist()
    return [replace(requests[i], arrived_at=stamps[i]) for i in by_time]


def by_group(requests: Sequence[Request]) -> dict[int, list[Request]]:
    """Group requests by `group_id`, groups by first appearance."""
    groups: dict[int, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.group_id, []).append(request)
    return groups


def check_unique(requests: Sequence[Request]) -> None:
    """Raise ValueError if an id repeats."""
    ids = [request.id for request in requests]
    if len(set(ids)) < len(ids):
        repeated = next(i for i in ids if ids.count(i) > 1)
        raise ValueError(f"requests.id repeats {repeated}, expected every id once.")


# ------------------------------------------------------------------------------
# Sessions: users or agents whose next request follows the answer to the previous one, after a
# think time.
# ------------------------------------------------------------------------------

#: Draws of think times with mean 1.
THINKS: dict[str, Callable[[np.random.Generator, int], Times]] = {
    "exponential": lambda rng, count: rng.standard_exponential(count),
    "constant": lambda rng, count: np.ones(count),
}


@dataclass
@ARRIVALS.register("sessions")
class Sessions(Arrivals):
    """Requests of one group are turns of a session: each follows the end of the one before it,
    after a think time.

    A session whose requests name those that they wait for (`after`) keeps that order; the others
    start as long after its first one as in the workload.
    """

    rate_rps: float | None = field(
        None,
        positive,
        "sessions that start per second, a Poisson process; null: each when its first request arrives",
    )
    think_s: float | None = field(
        None,
        not_negative,
        "mean seconds between an answer and the session's next request; null: the workload's",
    )
    think: str | None = field(None, THINKS, "distribution of think times; null: exponential")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.think is not None and self.think_s is None:
            raise ValueError(
                f"arrivals.think={self.think} with arrivals.think_s=null: expected arrivals.think_s too"
            )

    @property
    def draws(self) -> bool:
        return bool(self.rate_rps or (self.think_s and self.think != "constant"))

    @property
    def keeps_order(self) -> bool:
        return True

    def arrive(self, requests: Sequence[Request], rng: np.random.Generator) -> list[Request]:
        check_unique(requests)
        groups = list(by_group(requests).values())
        starts_rng, think_rng = rng.spawn(2)
        waits = self._waits(requests, think_rng)
        first = [group[0] for group in groups]
        if self.rate_rps is not None:
            gaps = starts_rng.standard_exponential(len(groups))
            first = with_arrival_times(first, np.cumsum(gaps) / self.rate_rps)
        turns = [
            turn
            for group, start in zip(groups, first, strict=True)
            for turn in _turns(group, waits, start.arrived_at)
        ]
        return sorted(turns, key=lambda request: request.arrived_at)

    def _waits(self, requests: Sequence[Request], rng: np.random.Generator) -> dict[int, int]:
        """Return the nanoseconds that each request waits once those before it have finished, by its
        id."""
        recorded = any(request.wait_ns for request in requests)
        if recorded and self.think_s is not None:
            raise ValueError(
                f"arrivals.think_s={self.think_s}: expected null, for the workload has think times"
            )
        alone = len({request.group_id for request in requests}) == len(requests)
        waits_are_known = alone or any(request.after for request in requests)
        if recorded or (waits_are_known and self.think_s is None):
            return {request.id: request.wait_ns for request in requests}
        if self.think_s is None:
            raise ValueError(
                "arrivals.think_s=null: expected a mean think time, for the workload has none"
            )
        drawn = THINKS[self.think or "exponential"](rng, len(requests)) * self.think_s * 1e9
        waits = np.rint(drawn).astype(np.int64).tolist()
        return {request.id: wait for request, wait in zip(requests, waits, strict=True)}


def _turns(group: list[Request], waits: dict[int, int], start: int) -> list[Request]:
    """Return the requests of one session that starts at `start`; those that wait for none keep
    their distance to it."""
    ordered = any(request.after for request in group)
    first = group[0].arrived_at
    turns = []
    for index, request in enumerate(group):
        after = (
            request.after
            if ordered
            else tuple(before.id for before in group[max(0, index - 1) : index])
        )
        begin = start if after else start + max(0, request.arrived_at - first)
        turns.append(replace(request, arrived_at=begin, after=after, wait_ns=waits[request.id]))
    return turns


# ------------------------------------------------------------------------------
# A stream with novel requests: known ones alone at first, then both in a random order.
# ------------------------------------------------------------------------------


@dataclass
@ARRIVALS.register("novel_stream")
class NovelStream(Arrivals):
    """A fixed number of requests in flight: `known_first` known ones alone, then all others mixed.

    All requests are ready at time zero, `clients` of them in flight. A request is novel if it
    shares no passage with another request.
    """

    clients: int = field(REQUIRED, positive, _CLIENTS, example=1)
    known_first: int = field(REQUIRED, positive, "requests before the first novel one", example=200)

    def arrive(self, requests: Sequence[Request], rng: np.random.Generator) -> list[Request]:
        check_unique(requests)
        novel, known_first = novel_requests(requests), self.known_first
        known_indices = [index for index, request in enumerate(requests) if request.id not in novel]
        if not novel or not 0 < known_first < len(known_indices):
            counted = f"{len(known_indices)} known and {len(novel)} novel requests"
            raise ValueError(
                f"arrivals.known_first={known_first} with {counted}: expected fewer than the "
                "known ones, and novel ones, as of workload.rag.novel"
            )
        drawn = rng.permutation(known_indices)
        novel_indices = [index for index, request in enumerate(requests) if request.id in novel]
        mixed = rng.permutation([*drawn[known_first:], *novel_indices])
        return [replace(requests[index], arrived_at=0) for index in [*drawn[:known_first], *mixed]]

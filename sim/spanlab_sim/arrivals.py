"""Arrival processes: they return the requests with arrival times, in order of arrival.

Every kind is a pure function of the requests, of a fresh Generator if it draws, and of its options. It returns
Requests sorted by `arrived_at`, integer nanoseconds, with unchanged ids. Unit-rate draws are divided by the rate,
so one seed gives one sample path that another rate only stretches: loads and policies are compared under common
random numbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from spanlab.core.protocol import novel_requests
from spanlab.core.request import Request
from spanlab.registry import Registry, one_of, positive

Times = NDArray[np.float64]
ORDERS = ("shuffled", "as_given", "by_group")
ARRIVALS: Registry[list[Request]] = Registry("arrivals", given=("requests", "rng"))
ARRIVALS.later("sessions", "spanlab_sim.arrivals")
ARRIVALS.later("novel_stream", "spanlab_sim.arrivals")
_LATEST_S = 9e9  # largest time that integer nanoseconds hold, about 285 years


@ARRIVALS.register("poisson")
def poisson(
    requests: Sequence[Request], rng: np.random.Generator, *, rate_rps: float, order: str = "shuffled"
) -> list[Request]:
    """One Poisson process for the whole system: independent exponential gaps with mean 1 / rate_rps."""
    return _system_wide(requests, rng, rng.standard_exponential(len(requests)), rate_rps, order)


@ARRIVALS.register("gamma")
def gamma(
    requests: Sequence[Request],
    rng: np.random.Generator,
    *,
    rate_rps: float,
    burstiness: float,
    order: str = "shuffled",
) -> list[Request]:
    """Independent Gamma gaps, mean 1 / rate_rps, squared coefficient of variation 1 / burstiness (1 is Poisson).

    The shape is vLLM's `burstiness`. vLLM's benchmark then rescales the gaps so that the last request arrives at
    exactly n / rate; here they stay as drawn, because a fixed total takes away the very fluctuation of the load
    that makes queues.
    """
    positive("arrivals.burstiness", burstiness)
    gaps = rng.standard_gamma(burstiness, len(requests)) / burstiness
    return _system_wide(requests, rng, gaps, rate_rps, order)


@ARRIVALS.register("deterministic")
def deterministic(
    requests: Sequence[Request], rng: np.random.Generator, *, rate_rps: float, order: str = "shuffled"
) -> list[Request]:
    """Equal gaps of 1 / rate_rps, one of them before the first request, as in the random kinds."""
    return _system_wide(requests, rng, np.ones(len(requests)), rate_rps, order)


@ARRIVALS.register("saturating")
def saturating(requests: Sequence[Request], rng: np.random.Generator, *, order: str = "shuffled") -> list[Request]:
    """All requests at time zero: what is served then per second is the most that can be."""
    return _system_wide(requests, rng, np.zeros(len(requests)), 1.0, order)


@ARRIVALS.register("poisson_per_group")
def poisson_per_group(requests: Sequence[Request], rng: np.random.Generator, *, rate_rps: float) -> list[Request]:
    """Each group asks its requests in their order, by a Poisson process of its own with rate_rps.

    Groups draw from spawned generators, so one group's length does not shift another's arrivals.
    """
    positive("arrivals.rate_rps", rate_rps)
    ordered: list[Request] = []
    unit: list[Times] = []
    groups = by_group(requests)
    for members, group_rng in zip(groups.values(), rng.spawn(len(groups)), strict=True):
        ordered += members
        unit.append(np.cumsum(group_rng.standard_exponential(len(members))))
    return with_arrival_times(ordered, np.concatenate([np.empty(0), *unit]) / rate_rps)


@ARRIVALS.register("closed_loop")
def closed_loop(
    requests: Sequence[Request], rng: np.random.Generator, *, clients: int, order: str = "by_group"
) -> list[Request]:
    """All requests ready at time zero; `serve` holds back all but `clients` of them."""
    check_unique(requests)
    positive("arrivals.clients", clients)
    return [replace(request, arrived_at=0) for request in _ordered(requests, rng, order)]


@ARRIVALS.register("as_given")
def as_given(requests: Sequence[Request]) -> list[Request]:
    """The arrival times that the requests carry, from a trace; equal times keep their order."""
    check_unique(requests)
    return sorted(requests, key=lambda request: request.arrived_at)


@ARRIVALS.register("interleaved_legacy")
def interleaved_legacy(requests: Sequence[Request], *, seed: int = 42) -> list[Request]:
    """The order of the published sparse-prefix study, draw for draw: its rows interleaved at one fixed load.

    Groups, in order of first appearance, are shuffled; each draws its first arrival from exponential(1 s); then the
    group with the least arrival, the earlier shuffled one on a tie, emits its next row and adds an exponential(1 s).
    Only NumPy's legacy generator gives those draws, hence a seed of its own.
    """
    check_unique(requests)
    legacy = np.random.RandomState(seed)
    groups = list(by_group(requests).values())
    legacy.shuffle(groups)  # type: ignore[arg-type]
    heap = [(float(legacy.exponential(1.0)), rank, 0) for rank in range(len(groups))]
    heapq.heapify(heap)
    emitted: list[Request] = []
    while heap:
        arrival_s, rank, row = heapq.heappop(heap)
        emitted.append(replace(groups[rank][row], arrived_at=round(arrival_s * 1e9)))
        if row + 1 < len(groups[rank]):
            heapq.heappush(heap, (arrival_s + float(legacy.exponential(1.0)), rank, row + 1))
    return emitted


def resample(requests: Sequence[Request], n: int, zipf_exponent: float, rng: np.random.Generator) -> list[Request]:
    """Draw n requests with replacement, groups by Zipf popularity and requests uniformly within; fresh ids 0 to n − 1.

    The group of rank r is drawn with probability proportional to r^−zipf_exponent (0: all alike); which group has
    which rank is drawn first. Drawn in the order in which they are to be asked, so pair it with order="as_given".
    """
    _check_popularity(requests, n, zipf_exponent)
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
    requests: Sequence[Request], rng: np.random.Generator, unit_gaps: Times, rate_rps: float, order: str
) -> list[Request]:
    positive("arrivals.rate_rps", rate_rps)
    # The gaps were drawn before the order, so all orders see the same arrival times.
    return with_arrival_times(_ordered(requests, rng, order), np.cumsum(unit_gaps) / rate_rps)


def _ordered(requests: Sequence[Request], rng: np.random.Generator, order: str) -> Sequence[Request]:
    """Return the requests in an order; `by_group`: groups in random order, requests of a group in theirs."""
    one_of("arrivals.order", order, ORDERS)
    if order == "as_given":
        return requests
    groups = list(by_group(requests).values()) if order == "by_group" else [[request] for request in requests]
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


def _check_popularity(requests: Sequence[Request], n: int, zipf_exponent: float) -> None:
    if n < 1 or not requests:
        raise ValueError(f"popularity.n is {n} with {len(requests)} requests to draw from, expected both positive.")
    if any(request.after for request in requests):
        raise ValueError(f"popularity.n is {n} where requests wait for others, expected every request once.")
    if not (zipf_exponent >= 0 and np.isfinite(zipf_exponent)):
        raise ValueError(f"popularity.zipf_exponent is {zipf_exponent}, expected 0 or more.")


# ------------------------------------------------------------------------------
# Sessions: users or agents whose next request follows the answer to the previous one, after a
# think time.
# ------------------------------------------------------------------------------

#: Draws of think times with mean 1.
THINKS: dict[str, Callable[[np.random.Generator, int], Times]] = {
    "exponential": lambda rng, count: rng.standard_exponential(count),
    "constant": lambda rng, count: np.ones(count),
}


@ARRIVALS.register("sessions")
def sessions(
    requests: Sequence[Request],
    rng: np.random.Generator,
    *,
    rate_rps: float | None = None,
    think_s: float | None = None,
    think: str = "exponential",
) -> list[Request]:
    """Requests of one group are turns of a session: each follows the end of the one before it, after a think time.

    A session whose requests name those that they wait for (`after`) keeps that order; the others start it together.

    `rate_rps`  sessions that start per second, a Poisson process; None: each starts when its first request arrives
    `think_s`   mean think time; None: the workload's own times
    """
    check_unique(requests)
    groups = list(by_group(requests).values())
    starts_rng, think_rng = rng.spawn(2)
    waits = _waits(requests, think_s, think, think_rng)
    first = _starts(groups, rate_rps, starts_rng)
    turns = [request for group, start in zip(groups, first, strict=True) for request in _turns(group, waits, start)]
    return sorted(turns, key=lambda request: request.arrived_at)


def _starts(groups: list[list[Request]], rate_rps: float | None, rng: np.random.Generator) -> list[int]:
    """Return the nanoseconds at which each session starts."""
    if rate_rps is None:
        return [group[0].arrived_at for group in groups]
    positive("arrivals.rate_rps", rate_rps)
    gaps = rng.standard_exponential(len(groups))
    starts = with_arrival_times([group[0] for group in groups], np.cumsum(gaps) / rate_rps)
    return [request.arrived_at for request in starts]


def _waits(requests: Sequence[Request], think_s: float | None, think: str, rng: np.random.Generator) -> dict[int, int]:
    """Return the nanoseconds that each request waits once those before it have finished, by its id."""
    recorded = any(request.wait_ns for request in requests)
    if recorded and think_s is not None:
        raise ValueError(f"arrivals.think_s={think_s}: expected null, for the workload has think times")
    alone = len({request.group_id for request in requests}) == len(requests)
    if recorded or (alone and think_s is None):
        return {request.id: request.wait_ns for request in requests}
    if think_s is None:
        raise ValueError("arrivals.think_s=null: expected a mean think time, for the workload has none")
    one_of("arrivals.think", think, THINKS)
    drawn = np.rint(THINKS[think](rng, len(requests)) * think_s * 1e9).astype(np.int64)
    return {request.id: wait for request, wait in zip(requests, drawn.tolist(), strict=True)}


def _turns(group: list[Request], waits: dict[int, int], start: int) -> list[Request]:
    """Return the requests of one session that starts at `start`."""
    ordered = any(request.after for request in group)
    turns = []
    for index, request in enumerate(group):
        after = request.after if ordered else tuple(before.id for before in group[max(0, index - 1) : index])
        turns.append(replace(request, arrived_at=start, after=after, wait_ns=waits[request.id]))
    return turns


# ------------------------------------------------------------------------------
# A stream with novel requests: known ones alone at first, then both in a random order.
# ------------------------------------------------------------------------------


@ARRIVALS.register("novel_stream")
def novel_stream(
    requests: Sequence[Request], rng: np.random.Generator, *, clients: int, known_first: int
) -> list[Request]:
    """All requests ready at time zero, `clients` of them in flight: `known_first` known ones, then all others mixed.

    A request is novel if it shares no passage with another request.
    """
    check_unique(requests)
    positive("arrivals.clients", clients)
    novel = novel_requests(requests)
    known_indices = [index for index, request in enumerate(requests) if request.id not in novel]
    if not novel or not 0 < known_first < len(known_indices):
        raise ValueError(
            f"arrivals.known_first={known_first} with {len(known_indices)} known and {len(novel)} novel requests: "
            "expected fewer than the known ones, and novel ones, as of workload.rag.novel"
        )
    drawn = rng.permutation(known_indices)
    novel_indices = [index for index, request in enumerate(requests) if request.id in novel]
    mixed = rng.permutation([*drawn[known_first:], *novel_indices])
    return [replace(requests[index], arrived_at=0) for index in [*drawn[:known_first], *mixed]]

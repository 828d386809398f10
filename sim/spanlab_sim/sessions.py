"""Sessions: users or agents whose next request follows the answer to the previous one, after a think time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from spanlab.checks import one_of, positive
from spanlab.core.request import Request
from spanlab_sim.arrivals import ARRIVALS, Times, by_group, check_unique, with_arrival_times

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

"""The placement that knows what will be asked for: states where requests to come leave what is known by then."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spanlab.core.cost import COST
from spanlab.core.eviction.contract import FUTURE
from spanlab.core.optimal import place
from spanlab.core.placement.contract import PLACEMENTS, ArmFacts, PrefillInfo


@PLACEMENTS.register("clairvoyant", needs=(FUTURE, COST))
class Clairvoyant:
    """`clairvoyant`: where requests to come leave the longest prefix that any request has had by then.

    `count`  states per prompt at most, those that save most if no later prompt places any; None: all of them

    The first request with a prefix computes its end, so that with memory for everything, one request at a time and
    `count` no less than the departures along a prompt, every request reuses what an infinite cache with a state at
    every position would: no placement is better. With fewer states, or where KV and states compete for memory, the
    choice is NP-hard; this one is then greedy, and the offline bound alone is never beaten.
    """

    def __init__(self, count: int | None = None, *, facts: ArmFacts) -> None:
        if facts.departures is None:
            raise ValueError(
                "placement.kind=clairvoyant: expected a simulated run, whose requests are known beforehand"
            )
        self._count, self._departures, self._cost = count, facts.departures, facts.cost("tokens")

    def observe(self, prefill: PrefillInfo) -> None:
        """What comes is known already."""

    def place(self, prefill: PrefillInfo) -> Sequence[int]:
        """Positions that this prompt computes and a later one needs."""
        along = self._departures.along(prefill.request)
        needed = sorted(position for position in along if position > prefill.resume)
        if self._count is None or len(needed) <= self._count:
            return needed
        weights = np.array([along[position] for position in needed], np.float64)
        return place(np.array(needed), weights, self._count, self._cost(prefill.resume, np.array(needed))).positions()

"""The clairvoyant placement: states where future requests diverge from all requests before them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spanlab.core.cost import COST
from spanlab.core.eviction.contract import FUTURE
from spanlab.core.optimal import place
from spanlab.core.placement.contract import PLACEMENTS, ArmFacts, PrefillInfo


@PLACEMENTS.register("clairvoyant", needs=(FUTURE, COST))
class Clairvoyant:
    """`clairvoyant`: where future requests diverge from the longest prefix of any request before them.

    `count`  maximum states per prompt, those that save most if no later prompt places any; None: all of them

    The first request with a prefix computes its end. With unlimited memory, one request at a time and `count` no less
    than the departures along a prompt, every request therefore reuses as much as from an infinite cache with a state at
    every position, which is optimal. With fewer states, or where KV and states compete for memory, the choice is
    NP-hard. This placement is then greedy, and only the offline bound is a limit for all placements.
    """

    def __init__(self, count: int | None = None, *, facts: ArmFacts) -> None:
        if facts.departures is None:
            raise ValueError(
                "placement.kind=clairvoyant: expected a simulated run, whose requests are known beforehand"
            )
        self._count, self._departures, self._cost = count, facts.departures, facts.cost("tokens")

    def observe(self, prefill: PrefillInfo) -> None:
        """Do nothing: the future is known."""

    def place(self, prefill: PrefillInfo) -> Sequence[int]:
        """Return the positions that this prompt computes and later ones need."""
        users = self._departures.along(prefill.request)
        needed = sorted(position for position in users if position > prefill.resume)
        if self._count is None or len(needed) <= self._count:
            return needed
        weights = np.array([users[position] for position in needed], np.float64)
        return place(np.array(needed), weights, self._count, self._cost(prefill.resume, np.array(needed))).positions()

"""The largest reuse of equal units under one capacity: farthest next use first, with bypass.

Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5
(1966). Each reuse of a unit needs one place during its interval of slots, intervals of one unit do
not overlap, and all reuses are worth the same. Of intervals that overlap too much, giving up those
that end last loses least: any solution that keeps one of these and gives up an earlier end stays
feasible when they are exchanged. The loop does so slot by slot, which is optimal for capacities
that differ by slot as well.

Units of one node have one interval, so nodes are counted in units and may be kept in part. Prefix
closure costs nothing: an ancestor's interval lies within its descendant's and both end at the same
admission, so the optimum may give up descendants first.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from spanlab.offline.forest import Ints
from spanlab.offline.reuses import Reuses


def most_reused_tokens(reuses: Reuses, capacity_tokens: Ints) -> int:
    """The largest reuse in tokens with room for `capacity_tokens` in each slot, shape (n,)."""
    capacity = np.maximum(capacity_tokens, 0) // reuses.unit
    held = (reuses.stop > reuses.first).nonzero()[0]
    held = held[np.argsort(reuses.first[held], kind="stable")]
    units = reuses.tokens[held] // reuses.unit
    if fits(reuses.first[held], reuses.stop[held], units, capacity):
        return reuses.infinite_tokens
    lost = _lost_units(reuses.first[held], reuses.stop[held], units, capacity)
    return reuses.infinite_tokens - lost * reuses.unit


def occupied(first: Ints, stop: Ints, amount: Ints, slots: int) -> Ints:
    """The sum in each slot of the amounts whose half-open range `[first, stop)` covers it."""
    change = np.bincount(first, amount, slots + 1) - np.bincount(stop, amount, slots + 1)
    return np.rint(np.cumsum(change[:slots])).astype(np.int64)


def fits(first: Ints, stop: Ints, amount: Ints, capacity: Ints) -> bool:
    """Whether all amounts fit at once."""
    return bool((occupied(first, stop, amount, len(capacity)) <= capacity).all())


def _lost_units(first: Ints, stop: Ints, units: Ints, capacity: Ints) -> int:
    """Units given up; rows are sorted by `first`."""
    room, starts = capacity.tolist(), np.searchsorted(first, np.arange(len(capacity) + 1)).tolist()
    ends, left = stop.tolist(), units.tolist()
    leaving = [0] * (len(room) + 1)
    by_end: list[tuple[int, int]] = []
    load = lost = 0
    for slot, most in enumerate(room):
        load -= leaving[slot]
        for row in range(starts[slot], starts[slot + 1]):
            heappush(by_end, (-ends[row], row))
            leaving[ends[row]] += left[row]
            load += left[row]
        while load > most:
            row = by_end[0][1]
            given_up = min(left[row], load - most)
            left[row] -= given_up
            leaving[ends[row]] -= given_up
            load, lost = load - given_up, lost + given_up
            if not left[row]:
                heappop(by_end)
    return lost

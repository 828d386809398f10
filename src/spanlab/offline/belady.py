"""The largest reuse of equal units under one capacity: evict the farthest next use first, with bypass.

Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5
(1966). Each reuse of a unit needs memory of one unit during its interval of slots, intervals of one
unit do not overlap, and all reuses have the same value. Where intervals exceed the capacity, dropping
those that end last loses least: a solution that keeps one of these and drops an interval with an
earlier end stays feasible when the two are exchanged. The loop does so slot by slot, which is also
optimal for capacities that differ by slot.

Units of one node have one interval, so nodes are counted in units and may be partly stored. Prefix
closure costs nothing: an ancestor's interval lies within its descendant's and both end at the same
admission, so the optimum may drop descendants first.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from spanlab.offline.forest import Ints
from spanlab.offline.reuses import Reuses


def most_reused_tokens(reuses: Reuses, capacity_tokens: Ints) -> int:
    """Return the largest reuse in tokens with memory for `capacity_tokens` in each slot, shape (n,)."""
    capacity = np.maximum(capacity_tokens, 0) // reuses.unit
    rows = (reuses.stop > reuses.first).nonzero()[0]
    rows = rows[np.argsort(reuses.first[rows], kind="stable")]
    units = reuses.tokens[rows] // reuses.unit
    if fits(reuses.first[rows], reuses.stop[rows], units, capacity):
        return reuses.infinite_tokens
    lost = _lost_units(reuses.first[rows], reuses.stop[rows], units, capacity)
    return reuses.infinite_tokens - lost * reuses.unit


def occupied(first: Ints, stop: Ints, amount: Ints, slots: int) -> Ints:
    """Return, for each slot, the sum of the amounts whose half-open range `[first, stop)` contains it."""
    change = np.bincount(first, amount, slots + 1) - np.bincount(stop, amount, slots + 1)
    return np.rint(np.cumsum(change[:slots])).astype(np.int64)


def fits(first: Ints, stop: Ints, amount: Ints, capacity: Ints) -> bool:
    """Whether all amounts fit at once."""
    return bool((occupied(first, stop, amount, len(capacity)) <= capacity).all())


def _lost_units(first: Ints, stop: Ints, units: Ints, capacity: Ints) -> int:
    """Return the number of dropped units; rows are sorted by `first`."""
    room, starts = capacity.tolist(), np.searchsorted(first, np.arange(len(capacity) + 1)).tolist()
    ends, remaining = stop.tolist(), units.tolist()
    expiring = [0] * (len(room) + 1)
    by_end: list[tuple[int, int]] = []
    load = lost = 0
    for slot, limit in enumerate(room):
        load -= expiring[slot]
        for row in range(starts[slot], starts[slot + 1]):
            heappush(by_end, (-ends[row], row))
            expiring[ends[row]] += remaining[row]
            load += remaining[row]
        while load > limit:
            row = by_end[0][1]
            dropped = min(remaining[row], load - limit)
            remaining[row] -= dropped
            expiring[ends[row]] -= dropped
            load, lost = load - dropped, lost + dropped
            if not remaining[row]:
                heappop(by_end)
    return lost

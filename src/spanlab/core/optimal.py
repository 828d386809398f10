"""Optimal checkpoint positions under a distribution of match depths: exact, in O(K·M) on K distinct depths.

Problem (the directional p-median on a line): choose at most M of the depths so that the expected work between the
deepest chosen depth not beyond t and t itself is least,

    min  sum_t p(t) · (w(t) - max{w(s) : s chosen, s <= t}),   w(0) = 0 being free,

with w increasing: w(t) = t counts tokens, w(t) = FLOPs to compute t tokens counts work. An optimum lies on depths with
mass. With prefix sums P = Σ p and W = Σ p·w, layer m is

    cost_m(j) = W(j) + min_s [ cost_{m-1}(s-1) - W(s-1) + w(s)·P(s-1) - w(s)·P(j) ],

a lower envelope of lines of slope -w(s) at x = P(j): the lower convex hull of the points (w(s), bracket) answers every
j. Candidates s > j need no exclusion: for them the bracket evaluates to no less than cost_{m-1}(j), which s = j beats.
Structure: Woeginger, "Monge strikes again", ORL 27 (2000).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_PRUNING_ROUNDS = 12


class Placement:
    """The solved problem: for every budget up to M and every prefix of the depths, where the optimum cuts."""

    def __init__(self, depths: NDArray[np.int64], cuts: list[NDArray[np.intp]], cost: Floats) -> None:
        self.depths = depths
        self._cuts = cuts
        self.cost = cost
        """Expected work left with 0, 1, … M checkpoints, over all depths; stops where it reaches zero."""

    def positions(self, limit: int | None = None) -> list[int]:
        """The chosen depths, increasing; with `limit`, the optimum for the mass at depths `<= limit` alone."""
        last = len(self.depths) if limit is None else int(np.searchsorted(self.depths, limit, side="right"))
        chosen: list[int] = []
        for cuts in reversed(self._cuts):
            if last == 0:
                break
            last = int(cuts[last - 1])
            chosen.append(int(self.depths[last]))
        return chosen[::-1]


def place(depths: NDArray[np.int64], mass: Floats, count: int, work: Floats | None = None) -> Placement:
    """Solve for up to `count` checkpoints.

    `depths`  strictly increasing, positive, shape (K,).
    `mass`    non-negative weight of each depth, shape (K,); depths without mass are left out.
    `work`    w at each depth, increasing, shape (K,); tokens where omitted.
    """
    kept = mass > 0
    depths, mass = depths[kept], mass[kept]
    x = depths.astype(np.float64) if work is None else np.asarray(work, np.float64)[kept]
    mass_to = np.concatenate([[0.0], np.cumsum(mass)])
    work_to = np.concatenate([[0.0], np.cumsum(mass * x)])
    cost, cuts = work_to, []
    totals = [float(cost[-1])]
    for _ in range(min(count, len(depths))):
        bracket = cost[:-1] - work_to[:-1] + x * mass_to[:-1]
        cut = _envelope(x, bracket, mass_to[1:])
        # a cut behind the depth itself is never better than one on it; rounding alone can pick one
        cut = np.minimum(cut, np.arange(len(x)))
        cost = np.concatenate([[0.0], work_to[1:] + bracket[cut] - x[cut] * mass_to[1:]])
        cuts.append(cut)
        totals.append(float(cost[-1]))
    return Placement(depths, cuts, np.maximum(totals, 0.0))


def _envelope(x: Floats, y: Floats, slopes: Floats) -> NDArray[np.intp]:
    """For every slope (non-decreasing) the index that minimises y - slope·x; the first one on ties."""
    hull = _lower_hull(x, y)
    return hull[_slopes(x[hull], y[hull]).searchsorted(slopes, side="left")]


def _slopes(x: Floats, y: Floats) -> Floats:
    """Slopes of the lines from each point to the next."""
    return (y[1:] - y[:-1]) / (x[1:] - x[:-1])


def _lower_hull(x: Floats, y: Floats) -> NDArray[np.intp]:
    """Indices of the lower convex hull of points with increasing x.

    A point above the segment between its neighbours cannot be on the hull, so whole rounds of points leave at once;
    what a few rounds have not settled (a hull needs as many rounds as its longest chain of pops) the classic scan does.
    """
    hull = np.arange(len(x))
    for _ in range(_PRUNING_ROUNDS):
        if len(hull) < 3:
            return hull
        slope = _slopes(x[hull], y[hull])
        kept = slope[:-1] < slope[1:]
        if kept.all():
            return hull
        hull = np.concatenate([hull[:1], hull[1:-1][kept], hull[-1:]])
    return _scan(hull, x, y)


def _scan(points: NDArray[np.intp], x: Floats, y: Floats) -> NDArray[np.intp]:
    """Andrew's monotone chain over `points`."""
    xs, ys = x[points].tolist(), y[points].tolist()
    kept: list[int] = []
    slopes: list[float] = []  # slopes[i] leads from kept[i] to kept[i + 1]
    for i, (px, py) in enumerate(zip(xs, ys, strict=True)):
        slope = 0.0
        while kept:
            slope = (py - ys[kept[-1]]) / (px - xs[kept[-1]])
            if not slopes or slopes[-1] < slope:
                break
            kept.pop()
            slopes.pop()
        if kept:
            slopes.append(slope)
        kept.append(i)
    return points[kept]

"""Optimal checkpoint positions under a distribution of match depths: exact, in O(K·M) on K distinct depths.

Problem (the directional p-median on a line): choose at most M of the depths so that the expected work between the
deepest chosen depth not beyond t and t itself is least,

    min  sum_t p(t) · (w(t) - max{w(s) : s chosen, s <= t}),   w(0) = 0 being free,

with w increasing: w(t) = t counts tokens, w(t) = FLOPs to compute t tokens counts work. An optimum lies on depths with
mass. A limit clips deeper mass to it: the last layer is then evaluated at the slope of the whole mass, over the depths
within the limit and the limit itself. With prefix sums P = Σ p and W = Σ p·w, layer m is

    cost_m(j) = W(j) + min_s [ cost_{m-1}(s-1) - W(s-1) + w(s)·P(s-1) - w(s)·P(j) ],

a lower envelope of lines of slope -w(s) at x = P(j): the lower convex hull of the points (w(s), bracket) answers every
j. Candidates s > j need no exclusion: for them the bracket evaluates to no less than cost_{m-1}(j), which s = j beats.
Structure: Woeginger, "Monge strikes again", ORL 27 (2000).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spanlab.core.placement.contract import Floats

Depths = NDArray[np.int64]

_PRUNING_ROUNDS = 12


@dataclass(frozen=True, slots=True)
class Support:
    """Depths with mass and their prefix sums.

    `depths`, `work`    strictly increasing, shape (K,); w at each depth
    `mass_to`, `work_to`  prefix sums of p and p·w, shape (K + 1,)
    """

    depths: Depths
    work: Floats
    mass_to: Floats
    work_to: Floats

    def bracket(self, cost: Floats) -> Floats:
        """Return the cost of a cut at each depth at slope zero, given the layer below; shape (K,)."""
        return cost[:-1] - self.work_to[:-1] + self.work * self.mass_to[:-1]


class Placement:
    """Solved placements of up to M checkpoints, for all depths and for every limit."""

    def __init__(self, grid: Depths, grid_work: Floats, support: Support, count: int) -> None:
        self.depths = support.depths
        self._grid, self._grid_work, self._support = grid, grid_work, support
        self._cuts: list[NDArray[np.intp]] = []
        self._below = support.work_to  # costs of the layer below the last one
        cost, totals = support.work_to, [float(support.work_to[-1])]
        for _ in range(min(count, len(self.depths))):
            self._below = cost
            cost = self._add_layer(cost)
            totals.append(float(cost[-1]))
        self.cost = np.maximum(totals, 0.0)
        """Expected work left with 0, 1, … M checkpoints, over all depths; stops where it reaches zero."""

    def _add_layer(self, cost: Floats) -> Floats:
        x, mass_to = self._support.work, self._support.mass_to[1:]
        bracket = self._support.bracket(cost)
        # a cut behind the depth itself is never better than one on it, but rounding can select one
        cut = np.minimum(_envelope(x, bracket, mass_to), np.arange(len(x)))
        self._cuts.append(cut)
        layer = self._support.work_to[1:] + bracket[cut] - x[cut] * mass_to
        return np.concatenate([[0.0], layer])

    def positions(self) -> list[int]:
        """Chosen depths, increasing."""
        return self._trace(len(self._cuts), len(self.depths))

    def positions_within(self, limit: int) -> list[int]:
        """Chosen depths `<= limit`, increasing, where mass beyond `limit` counts at `limit`.

        A prompt that is a prefix of a longer match is matched to its end, so deeper mass is clipped, not dropped.
        """
        inside = int(self.depths.searchsorted(limit, side="right"))
        if inside == len(self.depths) or not self._cuts:
            return self._trace(len(self._cuts), inside)
        end = int(self._grid.searchsorted(limit, side="right")) - 1
        if end < 0:
            return []
        last = self._last_cut(inside, end)
        deepest = self._grid[end] if last == inside else self.depths[last]
        return [*self._trace(len(self._cuts) - 1, last), int(deepest)]

    def _last_cut(self, inside: int, end: int) -> int:
        """Index of the last checkpoint among the first `inside` depths; `inside` stands for grid depth `end`."""
        if not inside:
            return inside
        support, total = self._support, self._support.mass_to[-1]
        costs = support.bracket(self._below)[:inside] - support.work[:inside] * total
        best = int(costs.argmin())
        if self.depths[inside - 1] == self._grid[end]:
            return best
        at_end = self._below[inside] - support.work_to[inside]
        at_end -= self._grid_work[end] * (total - support.mass_to[inside])
        return best if costs[best] <= at_end else inside

    def _trace(self, layers: int, last: int) -> list[int]:
        """Checkpoints of the optimum for the first `last` depths with up to `layers` of them."""
        chosen: list[int] = []
        for cuts in reversed(self._cuts[:layers]):
            if last == 0:
                break
            last = int(cuts[last - 1])
            chosen.append(int(self.depths[last]))
        return chosen[::-1]


def place(depths: Depths, mass: Floats, count: int, work: Floats | None = None) -> Placement:
    """Solve for up to `count` checkpoints.

    `depths`  strictly increasing, positive, shape (K,).
    `mass`    non-negative weight of each depth, shape (K,); depths without mass hold a checkpoint at a limit only.
    `work`    w at each depth, increasing, shape (K,); tokens where omitted.
    """
    x = depths.astype(np.float64) if work is None else np.asarray(work, np.float64)
    has_mass = mass > 0
    mass_to = np.concatenate([[0.0], np.cumsum(mass[has_mass])])
    work_to = np.concatenate([[0.0], np.cumsum((mass * x)[has_mass])])
    return Placement(depths, x, Support(depths[has_mass], x[has_mass], mass_to, work_to), count)


def _envelope(x: Floats, y: Floats, slopes: Floats) -> NDArray[np.intp]:
    """For every slope (non-decreasing) the index that minimises y - slope·x; the first one on ties."""
    hull = _lower_hull(x, y)
    return hull[_slopes(x[hull], y[hull]).searchsorted(slopes, side="left")]


def _slopes(x: Floats, y: Floats) -> Floats:
    """Slopes of the lines from each point to the next."""
    return (y[1:] - y[:-1]) / (x[1:] - x[:-1])


def _lower_hull(x: Floats, y: Floats) -> NDArray[np.intp]:
    """Indices of the lower convex hull of points with increasing x.

    A point above the segment between its neighbours cannot be on the hull, so each round removes many points at
    once. A hull needs as many rounds as its longest chain of pops, so the classic scan finishes after a few rounds.
    """
    hull = np.arange(len(x))
    for _ in range(_PRUNING_ROUNDS):
        if len(hull) < 3:
            return hull
        slope = _slopes(x[hull], y[hull])
        convex = slope[:-1] < slope[1:]
        if convex.all():
            return hull
        hull = np.concatenate([hull[:1], hull[1:-1][convex], hull[-1:]])
    return _scan(hull, x, y)


def _scan(points: NDArray[np.intp], x: Floats, y: Floats) -> NDArray[np.intp]:
    """Andrew's monotone chain over `points`."""
    xs, ys = x[points].tolist(), y[points].tolist()
    hull: list[int] = []
    slopes: list[float] = []  # slopes[i] leads from hull[i] to hull[i + 1]
    for i, (px, py) in enumerate(zip(xs, ys, strict=True)):
        slope = 0.0
        while hull:
            slope = (py - ys[hull[-1]]) / (px - xs[hull[-1]])
            if not slopes or slopes[-1] < slope:
                break
            hull.pop()
            slopes.pop()
        if hull:
            slopes.append(slope)
        hull.append(i)
    return points[hull]

"""The learning placement: optimal positions of states for the match depths observed so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np
from numpy.typing import NDArray

from spanlab.core.placement.rules import (
    PLACEMENTS,
    ArmFacts,
    Floats,
    PrefillInfo,
    balanced_positions,
)
from spanlab.model_spec import COST, Cost
from spanlab.registry import Registry, check_keys, field, not_negative, positive, share_above_zero

# ------------------------------------------------------------------------------
# Optimal checkpoint positions under a distribution of match depths: exact, in O(K·M) on K
# distinct depths.
#
# Problem (the directional p-median on a line): choose at most M of the depths so that the
# expected work between the deepest chosen depth not beyond t and t itself is least,
#
#     min  sum_t p(t) · (w(t) - max{w(s) : s chosen, s <= t}),   w(0) = 0 being free,
#
# with w increasing: w(t) = t counts tokens, w(t) = FLOPs to compute t tokens counts work. An
# optimum lies on depths with mass. A limit clips deeper mass to it: the last layer is then
# evaluated at the slope of the whole mass, over the depths within the limit and the limit
# itself. With prefix sums P = Σ p and W = Σ p·w, layer m is
#
#     cost_m(j) = W(j) + min_s [ cost_{m-1}(s-1) - W(s-1) + w(s)·P(s-1) - w(s)·P(j) ],
#
# a lower envelope of lines of slope -w(s) at x = P(j): the lower convex hull of the points
# (w(s), bracket) answers every j. Candidates s > j need no exclusion: for them the bracket
# evaluates to no less than cost_{m-1}(j), which s = j beats. Structure: Woeginger, "Monge
# strikes again", ORL 27 (2000).
# ------------------------------------------------------------------------------

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
        """Return the cost of a cut at each depth at slope zero, given the layer below; shape
        (K,)."""
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
            x, mass_to = self._support.work, self._support.mass_to[1:]
            bracket = self._support.bracket(cost)
            # for every slope (non-decreasing) the index that minimises y - slope·x, the first on
            # ties
            hull = _lower_hull(x, bracket)
            least = hull[_slopes(x[hull], bracket[hull]).searchsorted(mass_to, side="left")]
            # a cut behind the depth is never better than one on it, but rounding can select one
            cut = np.minimum(least, np.arange(len(x)))
            self._cuts.append(cut)
            layer = self._support.work_to[1:] + bracket[cut] - x[cut] * mass_to
            cost = np.concatenate([[0.0], layer])
            totals.append(float(cost[-1]))
        self.cost = np.maximum(totals, 0.0)
        """Expected work left with 0, 1, … M checkpoints, over all depths; stops where it reaches
        zero."""

    def positions(self) -> list[int]:
        """Chosen depths, increasing."""
        return self._trace(len(self._cuts), len(self.depths))

    def positions_within(self, limit: int) -> list[int]:
        """Chosen depths `<= limit`, increasing, where mass beyond `limit` counts at `limit`.

        A prompt that is a prefix of a longer match is matched to its end, so deeper mass is
        clipped, not dropped.
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
        """Index of the last checkpoint among the first `inside` depths; `inside` stands for grid
        depth `end`."""
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
    `mass`    non-negative weight of each depth, shape (K,); depths without mass hold a checkpoint
              at a limit only.
    `work`    w at each depth, increasing, shape (K,); tokens where omitted.
    """
    x = depths.astype(np.float64) if work is None else np.asarray(work, np.float64)
    has_mass = mass > 0
    mass_to = np.concatenate([[0.0], np.cumsum(mass[has_mass])])
    work_to = np.concatenate([[0.0], np.cumsum((mass * x)[has_mass])])
    return Placement(depths, x, Support(depths[has_mass], x[has_mass], mass_to, work_to), count)


def _slopes(x: Floats, y: Floats) -> Floats:
    """Slopes of the lines from each point to the next."""
    return (y[1:] - y[:-1]) / (x[1:] - x[:-1])


def _lower_hull(x: Floats, y: Floats) -> NDArray[np.intp]:
    """Indices of the lower convex hull of points with increasing x.

    A point above the segment between its neighbours cannot be on the hull, so each round removes
    many points at once. A hull needs as many rounds as its longest chain of pops, so the classic
    scan finishes after a few rounds.
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


EVERY, DECAY = 10, 0.99


class Solution(Protocol):
    """Checkpoint positions in tokens, increasing: for all depths, or for prompts of a length."""

    def positions(self) -> list[int]: ...

    def positions_within(self, limit: int) -> list[int]: ...


#: A solver receives the weight of each bin of match depths, the tokens of a bin, the number of
#: states and the cost.
SOLVERS: Registry[Solution] = Registry("solver", given=("histogram", "bin_tokens", "count", "cost"))


@dataclass
class Dp:
    """How `placement.kind=dp` learns; see `spanlab.core.placement.DynamicProgram`."""

    update: str = field(
        "decayed",
        ("frozen", "periodic", "decayed"),
        "frozen: solve once, after the warm-up; periodic: solve again, forget nothing; decayed: solve again, with "
        "older observations weighted less",
    )
    every: int | None = field(
        None, positive, "observations between two solutions; not where frozen; null: 10"
    )
    decay: float | None = field(
        None,
        share_above_zero,
        "factor on older observations, per observation; decayed only; null: 0.99",
    )
    warmup: int | None = field(
        None, not_negative, "observations before the first solution; null: the study's warm-up"
    )
    max_tokens: int | None = field(
        None, positive, "largest depth of the histogram; null: the longest prompt of the workload"
    )
    smoothing: float = field(0.0, not_negative, "count added to every bin before solving (Laplace)")
    backtrack: str = field(
        "per_length",
        ("per_length", "fixed"),
        "per_length: the optimum for the prompt's length; fixed: one set of positions for all lengths",
    )
    observe: str = field(
        "seen",
        ("seen", "matched"),
        "seen: longest prefix of any earlier prompt; matched: longest stored prefix",
    )
    solver: str = field(
        "optimal",
        SOLVERS,
        "optimal, or published: the recurrence of arXiv 2605.05219 with its rounding",
    )

    def check(self, path: str) -> None:
        """Raise ValueError for invalid values; `path` is the key of these settings."""
        check_keys(self, lambda key: f"{path}.{key}", path)
        # keys that would have no effect
        if self.every is not None and self.update == "frozen":
            raise ValueError(
                f"{path}.every={self.every} with dp.update=frozen: expected null, for it solves once"
            )
        if self.decay is not None and self.update != "decayed":
            raise ValueError(
                f"{path}.decay={self.decay} with dp.update={self.update}: expected null, or update=decayed"
            )
        if self.solver != "optimal" and self.backtrack != "fixed":
            raise ValueError(
                f"{path}.backtrack={self.backtrack} with dp.solver={self.solver}: expected fixed"
            )


@SOLVERS.register("optimal")
def solve_exactly(histogram: Floats, bin_tokens: int, count: int, cost: Cost) -> Solution:
    """Minimise the expected cost of the tokens between a match and the last state before it."""
    depths = np.arange(1, len(histogram)) * bin_tokens
    return place(depths, histogram[1:], count, cost(0, depths))


@PLACEMENTS.register("dp", needs=(COST,))
class DynamicProgram:
    """`dp`: the optimum for the match depths observed so far, in bins of the grid; `balanced`
    before any solution.

    Eviction biases the depths of `observe=matched` downwards.
    """

    def __init__(
        self,
        count: Annotated[int, positive, "most states per prompt"],
        dp: Annotated[Dp, "how it learns"],
        *,
        facts: ArmFacts,
    ) -> None:
        self._count, self._dp, self._bin_tokens = count, dp, facts.grid
        self._warmup = facts.warmup if dp.warmup is None else dp.warmup
        self._every = 0 if dp.update == "frozen" else EVERY if dp.every is None else dp.every
        self._decay = 1.0 if dp.update != "decayed" else DECAY if dp.decay is None else dp.decay
        self._cost = facts.cost("tokens")
        self._histogram = np.zeros((dp.max_tokens or facts.max_tokens) // facts.grid + 1)
        self._observed = 0
        self._solution: Solution | None = None
        self._fixed: list[int] = []

    def observe(self, prefill: PrefillInfo) -> None:
        """Count a match depth, and solve again when due."""
        if self._observed == self._warmup:
            self._solve()
        depth = prefill.matched if self._dp.observe == "matched" else prefill.seen
        if self._decay != 1.0:
            self._histogram *= self._decay
        self._histogram[min(depth // self._bin_tokens, len(self._histogram) - 1)] += 1.0
        self._observed += 1
        if self._observed > self._warmup and self._every and self._observed % self._every == 0:
            self._solve()

    def place(self, prefill: PrefillInfo) -> Sequence[int]:
        """Return positions for a prompt by the last solution."""
        if self._solution is None or (not self._fixed and self._observed < self._every):
            return balanced_positions(prefill.prompt, self._count)
        if self._dp.backtrack == "per_length":
            return self._solution.positions_within(prefill.prompt)
        return [position for position in self._fixed if position <= prefill.prompt]

    def _solve(self) -> None:
        histogram = self._histogram + self._dp.smoothing
        self._solution = SOLVERS[self._dp.solver](
            histogram, self._bin_tokens, self._count, self._cost
        )
        self._fixed = self._solution.positions()


# ------------------------------------------------------------------------------
# The published study's solver (arXiv 2605.05219), with its rounding and backtracking.
#
# The recurrence over m checkpoints, the bins 1 … N and the last checkpoint s is
#
#     cost_m(j) = min_{1 <= s <= j} ((cost_{m-1}(s-1) + moment(j)) - moment(s-1)) - s · (mass(j) -
#     mass(s-1)),
#
# with prefix sums of the normalised histogram in float64, evaluated in this order, and the
# first minimum in s. With more checkpoints than distinct depths every exact cost is zero, and
# only rounding errors decide between equal placements. Reproducing the published positions
# exactly therefore needs the published order of operations; that of `optimal.place` is
# different.
# ------------------------------------------------------------------------------

Bins = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class FixedPositions:
    """One set of positions for prompts of every length."""

    chosen: tuple[int, ...]

    def positions(self) -> list[int]:
        """Positions in tokens, increasing."""
        return list(self.chosen)

    def positions_within(self, limit: int) -> list[int]:
        """Positions `<= limit`, increasing."""
        return [position for position in self.chosen if position <= limit]


@SOLVERS.register("published")
def solve_as_published(
    histogram: Floats, bin_tokens: int, count: int, cost: Cost
) -> FixedPositions:
    """Solve for up to `count` checkpoints as the published program does, with tokens as cost.

    `histogram`  weight of match depths by bins of `bin_tokens`, shape (N + 1,); bin 0 counts
                 misses.
    """
    bins = published_bins(histogram, count)
    return FixedPositions(tuple(index * bin_tokens for index in bins))


def published_bins(histogram: Floats, count: int) -> list[int]:
    """Return the distinct checkpoint bins of the published recurrence, increasing.

    Backtracking starts at bin N. Where it reaches bin 0 with checkpoints left, it restarts at bin N
    one layer below, because the original indexes an array by -1 there.
    """
    last_bin = len(histogram) - 1
    chosen, end = set(), last_bin
    for splits in reversed(_layers(_Table(histogram), min(count, last_bin))):
        split = int(splits[end])
        chosen.add(split)
        end = split - 1 if split else last_bin
    return sorted(chosen - {0})


def _layers(table: _Table, count: int) -> list[Bins]:
    """Return the best last checkpoint of each bin, by layer; a layer that changes no cost is
    repeated."""
    layers: list[Bins] = []
    cost = table.moment
    while len(layers) < count:
        below = cost
        cost, splits = table.layer(below)
        layers.append(splits)
        if np.array_equal(cost, below):
            return layers + [splits] * (count - len(layers))
    return layers


class _Table:
    """Costs of the recurrence, evaluated in full only at bins with mass.

    Between two such bins the prefix sums are constant, bit by bit. A bin j there has the costs of
    the previous bin with mass, and those of splits in between, whose last term is zero.
    """

    def __init__(self, histogram: Floats) -> None:
        total = histogram.sum()
        share = histogram / total if total else histogram
        size = len(share)
        self.mass = np.cumsum(share)
        self.moment = np.cumsum(share * np.arange(size, dtype=np.float64))
        loaded = np.flatnonzero(share > 0)
        self._rows = np.union1d([1], loaded[loaded > 0])
        self._owner = self._rows.searchsorted(np.arange(1, size), side="right") - 1
        self._ends = np.append(self._rows, size)[self._owner + 1]
        self._free = np.setdiff1d(np.arange(1, size), self._rows)
        splits = np.arange(1, self._rows[-1] + 1)
        before = self.mass[: len(splits)]
        self._lost = splits * (self.mass[self._rows, None] - before)
        self._lost[splits > self._rows[:, None]] = -np.inf

    def layer(self, below: Floats) -> tuple[Floats, Bins]:
        """Return costs with one checkpoint more than `below`, and the first best last checkpoint;
        shapes (N + 1,)."""
        width = self._lost.shape[1]
        options = below[:width] + self.moment[self._rows, None]
        options -= self.moment[:width]
        options -= self._lost
        first = options.argmin(axis=1)
        best = options[np.arange(len(first)), first]
        cost = np.concatenate([[0.0], best[self._owner]])
        splits = np.concatenate([[0], first[self._owner] + 1])
        # use splits at bins without mass where rounding makes one cheaper than all splits before it
        options = (below[:-1] + self.moment[1:]) - self.moment[:-1]
        cheaper = self._free[options[self._free - 1] < cost[self._free]]
        for split in cheaper.tolist():
            option = options[split - 1]
            if option < cost[split]:
                end = self._ends[split - 1]
                cost[split:end] = option
                splits[split:end] = split
        return cost, splits

"""The published study's solver (arXiv 2605.05219), with its rounding and backtracking.

The recurrence over m checkpoints, the bins 1 … N and the last checkpoint s is

    cost_m(j) = min_{1 <= s <= j} ((cost_{m-1}(s-1) + moment(j)) - moment(s-1)) - s · (mass(j) - mass(s-1)),

with prefix sums of the normalised histogram in float64, evaluated in this order, and the first minimum in s. With more
checkpoints than distinct depths every exact cost is zero, and only rounding errors decide between equal placements.
Reproducing the published positions exactly therefore needs the published order of operations; that of `optimal.place`
is different.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spanlab.core.cost import Cost
from spanlab.core.placement.contract import Floats
from spanlab.core.placement.dynamic_program import SOLVERS

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
def solve_as_published(histogram: Floats, bin_tokens: int, count: int, cost: Cost) -> FixedPositions:
    """Solve for up to `count` checkpoints as the published program does, with tokens as cost.

    `histogram`  weight of match depths by bins of `bin_tokens`, shape (N + 1,); bin 0 counts misses.
    """
    bins = published_bins(histogram, count)
    return FixedPositions(tuple(index * bin_tokens for index in bins))


def published_bins(histogram: Floats, count: int) -> list[int]:
    """Return the distinct checkpoint bins of the published recurrence, increasing.

    Backtracking starts at bin N. Where it reaches bin 0 with checkpoints left, it restarts at bin N one layer below,
    because the original indexes an array by -1 there.
    """
    last_bin = len(histogram) - 1
    chosen, end = set(), last_bin
    for splits in reversed(_layers(_Table(histogram), min(count, last_bin))):
        split = int(splits[end])
        chosen.add(split)
        end = split - 1 if split else last_bin
    return sorted(chosen - {0})


def _layers(table: _Table, count: int) -> list[Bins]:
    """Return the best last checkpoint of each bin, by layer; a layer that changes no cost is repeated."""
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

    Between two such bins the prefix sums are constant, bit by bit. A bin j there has the costs of the previous bin with
    mass, and those of splits in between, whose last term is zero.
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
        """Return costs with one checkpoint more than `below`, and the first best last checkpoint; shapes (N + 1,)."""
        width = self._lost.shape[1]
        options = below[:width] + self.moment[self._rows, None]
        options -= self.moment[:width]
        options -= self._lost
        first = options.argmin(axis=1)
        best = options[np.arange(len(first)), first]
        cost = np.concatenate([[0.0], best[self._owner]])
        splits = np.concatenate([[0], first[self._owner] + 1])
        self._split_between(below, cost, splits)
        return cost, splits

    def _split_between(self, below: Floats, cost: Floats, splits: Bins) -> None:
        """Use splits at bins without mass where rounding makes one cheaper than all splits before it."""
        options = (below[:-1] + self.moment[1:]) - self.moment[:-1]
        cheaper = self._free[options[self._free - 1] < cost[self._free]]
        for split in cheaper.tolist():
            option = options[split - 1]
            if option < cost[split]:
                end = self._ends[split - 1]
                cost[split:end] = option
                splits[split:end] = split

"""A bound on reuse that needs several resources at once: KV, states and entries.

Reuse of x tokens occupies the KV of all of them, one recurrent state and one entry, each during its
own range of slots. Choosing x for every path is a packing problem, NP-hard with two sizes (Berger
et al., "Practical Bounds on Optimal Caching with Variable Object Sizes", POMACS 2, 2018; their
PFOO-U is the special case of one price for all slots). Weak duality bounds it: for any prices of
memory per slot that are not negative,

    reused <= sum over paths of max(0, max over x of x - price of what x occupies)
              + sum over slots of price * capacity,

because no feasible choice pays more than the last sum. Prices only decide how close the bound is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from spanlab.offline.belady import occupied
from spanlab.offline.forest import Ints
from spanlab.offline.reuses import Flags, Floats, Reuses

_SCALES = 24  # uniform prices that are tried, each half of the one before
_ROUNDS = 120
_HOPED = 0.03  # share of the bound that one step hopes to save; halved when steps stop helping
_PATIENCE = 5  # steps that may fail before it is
_MOMENTUM = 0.7


@dataclass(frozen=True)
class Resource:
    """One budget: `capacity` bytes (or entries) in each slot, and what a reuse takes of it.

    `per_token`  of every reused token, while its unit must stay
    `per_reuse`  of every reuse, while the last unit of the reused tokens must stay (a state)
    `per_path`   of every reuse, while the first unit of its path must stay (an entry)
    """

    capacity: Ints
    per_token: int = 0
    per_reuse: int = 0
    per_path: int = 0


def priced_bound(reuses: Reuses, resources: list[Resource]) -> int:
    """Tokens that no choice within the resources can exceed, in whole units."""
    if not len(reuses.tokens) or not resources:
        return reuses.infinite_tokens
    best = _Prices(_Options(reuses), resources).search()
    return int(best / reuses.unit + 1e-6) * reuses.unit


class _Options:
    """Reused lengths to choose from: per row the whole node, or only its first unit.

    The price of a length is linear within a node, so the lengths between these are never better.
    """

    def __init__(self, reuses: Reuses) -> None:
        self.reuses = reuses
        new = np.concatenate([[True], reuses.path[1:] != reuses.path[:-1]])
        self.heads = new.nonzero()[0]  # first row of each path
        self.path = np.cumsum(new) - 1
        self.head = self.heads[self.path]

    def along_path(self, values: Floats) -> Floats:
        """Sums from the path's start down to each row."""
        total = np.cumsum(values)
        along: Floats = total - (total - values)[self.head]
        return along

    def best(self, whole: Floats, part: Floats) -> Floats:
        """The largest gain of each path, zero for no reuse."""
        return np.maximum(np.maximum.reduceat(np.maximum(whole, part), self.heads), 0.0)

    def chosen(self, whole: Floats, part: Floats, best: Floats) -> tuple[Ints, Flags]:
        """Last row of each path with a positive gain, and whether only its first unit is taken."""
        hit = np.maximum(whole, part) >= best[self.path]
        rows = (hit & (best[self.path] > 0)).nonzero()[0]
        rows = rows[np.unique(self.path[rows], return_index=True)[1]]
        return rows, part[rows] > whole[rows]


@dataclass(frozen=True)
class _Point:
    """Prices, the bound there, its slope by price, and the direction that led there."""

    prices: Floats
    value: float
    slope: Floats
    direction: Floats


class _Prices:
    """The dual problem: prices per slot and resource, improved step by step."""

    def __init__(self, options: _Options, resources: list[Resource]) -> None:
        self.options, self.resources = options, resources
        self.capacity = np.array([resource.capacity for resource in resources], np.float64)

    def search(self) -> float:
        """The least bound found, by subgradient steps of Polyak's length with momentum."""
        usage = self._usage(np.arange(len(self.options.path)), None)
        if (usage <= self.capacity).all():
            return float(self.options.reuses.infinite_tokens)
        at = best = self._start()
        hoped, stalled = _HOPED, 0
        for _ in range(_ROUNDS):
            at = self._step(at, best.value * (1 - hoped))
            if at.value < best.value:
                best, stalled = at, 0
                continue
            stalled += 1
            if stalled == _PATIENCE:
                at, hoped, stalled = replace(best, direction=0 * best.direction), hoped / 2, 0
        return best.value

    def _step(self, at: _Point, target: float) -> _Point:
        """Where a bound of this slope would meet the target; prices never fall below zero."""
        direction = at.slope + _MOMENTUM * at.direction
        moving = np.where((at.prices <= 0) & (direction > 0), 0.0, direction)
        length = (at.value - target) / max(float((moving**2).sum()), 1e-300)
        return self._point(np.maximum(at.prices - length * moving, 0.0), direction)

    def _start(self) -> _Point:
        """The best of some uniform prices, where each resource alone would cost the same."""
        total = np.maximum(self.capacity.sum(axis=1, keepdims=True), 1.0)
        scale = self.options.reuses.infinite_tokens / total / len(self.resources)
        none = np.zeros_like(self.capacity)
        tried = [self._point(none + scale * 0.5**i, none) for i in range(_SCALES)]
        return min(tried, key=lambda point: point.value)

    def _point(self, prices: Floats, direction: Floats) -> _Point:
        value, usage = self._evaluate(prices)
        return _Point(prices, value, self.capacity - usage, direction)

    def _evaluate(self, prices: Floats) -> tuple[float, Floats]:
        """The bound at these prices, and what the choice behind it would occupy."""
        reuses, options = self.options.reuses, self.options
        until = np.concatenate([np.zeros((len(prices), 1)), np.cumsum(prices, axis=1)], axis=1)
        span = until[:, reuses.stop] - until[:, reuses.first]
        per_token, per_reuse, per_path = self._takes()
        node_price = per_token @ span * reuses.tokens
        above = options.along_path(node_price) - node_price
        fixed = per_reuse @ span + (per_path @ span)[options.head]
        whole = reuses.depth - above - node_price - fixed
        shorter = 1 - reuses.unit / reuses.tokens
        part = whole - (reuses.tokens - reuses.unit) + node_price * shorter
        best = options.best(whole, part)
        value = float(best.sum() + (prices * self.capacity).sum())
        return value, self._usage(*options.chosen(whole, part, best))

    def _takes(self) -> tuple[Floats, Floats, Floats]:
        taken = [(r.per_token, r.per_reuse, r.per_path) for r in self.resources]
        per_token, per_reuse, per_path = np.array(taken, np.float64).T
        return per_token, per_reuse, per_path

    def _usage(self, rows: Ints, in_part: Flags | None) -> Floats:
        """What reuse up to these rows occupies, by resource and slot.

        `in_part`  rows of which only the first unit is taken
        """
        reuses, options = self.options.reuses, self.options
        last = np.full(len(options.heads), -1, np.int64)
        last[options.path[rows]] = rows  # the deepest row of a path, where several are given
        deepest = last[last >= 0]
        tokens = np.where(np.arange(len(options.path)) <= last[options.path], reuses.tokens, 0)
        if in_part is not None:
            tokens[rows[in_part]] = reuses.unit
        kv = self._occupied(np.arange(len(tokens)), tokens)
        states = self._occupied(deepest, np.ones_like(deepest))
        entries = self._occupied(options.head[deepest], np.ones_like(deepest))
        per_token, per_reuse, per_path = self._takes()
        usage: Floats = np.outer(per_token, kv) + np.outer(per_reuse, states)
        usage += np.outer(per_path, entries)
        return usage

    def _occupied(self, rows: Ints, amount: Ints) -> Ints:
        reuses = self.options.reuses
        return occupied(reuses.first[rows], reuses.stop[rows], amount, reuses.slots)

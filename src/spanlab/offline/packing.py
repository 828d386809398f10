"""The choice behind a bound: how much each path reuses, where what is reused occupies memory for a while.

Reuse of x tokens occupies the KV of all of them, one recurrent state and one entry, each during its own range of
slots. Choosing x for every path is a packing problem, NP-hard with two sizes (Berger et al., "Practical Bounds on
Optimal Caching with Variable Object Sizes", POMACS 2, 2018). Weak duality bounds it: for any prices of memory per slot
that are not negative,

    gain <= sum over paths of max(0, max over x of gain(x) - price of what x occupies)
            + sum over slots of price * capacity,

because no feasible choice pays more than the last sum. Prices only decide how close the bound is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanlab.offline.belady import occupied
from spanlab.offline.forest import Ints
from spanlab.offline.reuses import Flags, Floats, Reuses


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


@dataclass(frozen=True)
class Gains:
    """What reuse of a path is worth that ends in a row: with all of its node, or with its first unit alone.

    Between these two it must not lie above the straight line; shapes (rows,).
    """

    whole: Floats
    part: Floats


def in_tokens(reuses: Reuses) -> Gains:
    """Every token is worth one."""
    return Gains(reuses.depth.astype(np.float64), (reuses.depth - reuses.tokens + reuses.unit).astype(np.float64))


@dataclass(frozen=True)
class Choice:
    """The best answer to some prices: `value` is a bound, `usage` what is chosen occupies, shape (resources, slots)."""

    value: float
    usage: Floats


class Packing:
    """The reuses of one run beside its budgets; slots in which everything fits are left out.

    A path ends in a row with the whole node or with its first unit: price and gain are linear within a node, so no
    length between these is better.
    """

    def __init__(self, reuses: Reuses, resources: list[Resource], gains: Gains) -> None:
        self.reuses, self.gains = reuses, gains
        self.new = np.concatenate([[True], reuses.path[1:] != reuses.path[:-1]])
        self.heads = self.new.nonzero()[0]  # first row of each path
        self.path = np.cumsum(self.new) - 1
        self.head = self.heads[self.path]
        taken = [(r.per_token, r.per_reuse, r.per_path) for r in resources]
        self.per_token, self.per_reuse, self.per_path = np.array(taken, np.float64).reshape(-1, 3).T
        self.first, self.stop = reuses.first, reuses.stop
        capacity = [resource.capacity for resource in resources]
        self.capacity = np.array(capacity, np.float64).reshape(-1, reuses.slots)
        self._leave_out_slots()

    def _leave_out_slots(self) -> None:
        """Keep the slots in which not everything fits; the deepest reuse of a path occupies the most."""
        deepest = np.append(self.heads[1:], len(self.path)) - 1
        tight = np.flatnonzero(np.any(self.usage(deepest) > self.capacity, axis=0))
        self.first, self.stop = np.searchsorted(tight, self.first), np.searchsorted(tight, self.stop)
        self.capacity = self.capacity[:, tight]

    @property
    def slots(self) -> int:
        """How many are left."""
        return int(self.capacity.shape[1])

    def everything(self) -> float:
        """The gain where nothing gives way."""
        return float(np.maximum(np.maximum.reduceat(self.gains.whole, self.heads), 0.0).sum())

    def choose(self, prices: Floats) -> Choice:
        """The best choice at these prices, shape (resources, slots)."""
        until = np.concatenate([np.zeros((len(prices), 1)), np.cumsum(prices, axis=1)], axis=1)
        span = until[:, self.stop] - until[:, self.first]
        tokens = self.reuses.tokens
        node_price = self.per_token @ span * tokens
        above = self._along_path(node_price) - node_price
        fixed = above + self.per_reuse @ span + (self.per_path @ span)[self.head]
        whole = self.gains.whole - node_price - fixed
        part = self.gains.part - node_price * (self.reuses.unit / tokens) - fixed
        best = np.maximum(np.maximum.reduceat(np.maximum(whole, part), self.heads), 0.0)
        value = float(best.sum() + (prices * self.capacity).sum())
        return Choice(value, self.usage(*self._chosen(whole, part, best)))

    def _along_path(self, values: Floats) -> Floats:
        """Sums from the path's start down to each row."""
        total = np.cumsum(values)
        along: Floats = total - (total - values)[self.head]
        return along

    def _chosen(self, whole: Floats, part: Floats, best: Floats) -> tuple[Ints, Flags]:
        """Last row of each path with a positive gain, and whether only its first unit is taken."""
        hit = np.maximum(whole, part) >= best[self.path]
        rows = (hit & (best[self.path] > 0)).nonzero()[0]
        rows = rows[np.unique(self.path[rows], return_index=True)[1]]
        return rows, part[rows] > whole[rows]

    def usage(self, rows: Ints, in_part: Flags | None = None) -> Floats:
        """What reuse up to these rows, one of a path, occupies, by resource and slot.

        `in_part`  rows of which only the first unit is taken
        """
        last = np.full(len(self.heads), -1, np.int64)
        last[self.path[rows]] = rows
        tokens = np.where(np.arange(len(self.path)) <= last[self.path], self.reuses.tokens, 0)
        if in_part is not None:
            tokens[rows[in_part]] = self.reuses.unit
        ones, heads = np.ones_like(rows), self.head[rows]
        kv = self._occupied(np.arange(len(tokens)), tokens)
        states, entries = self._occupied(rows, ones), self._occupied(heads, ones)
        usage: Floats = np.outer(self.per_token, kv) + np.outer(self.per_reuse, states)
        usage += np.outer(self.per_path, entries)
        return usage

    def _occupied(self, rows: Ints, amount: Ints) -> Ints:
        return occupied(self.first[rows], self.stop[rows], amount, self.slots)

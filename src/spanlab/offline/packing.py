"""The packing problem behind a bound: how much each path reuses, with memory occupied during ranges of slots.

Reuse of x tokens occupies the KV of all of them, one recurrent state and one entry, each during its own range of
slots. Choosing x for every path is a packing problem, NP-hard with two sizes (Berger et al., "Practical Bounds on
Optimal Caching with Variable Object Sizes", POMACS 2, 2018). Weak duality bounds it: for any prices of memory per slot
that are not negative,

    gain <= sum over paths of max(0, max over x of gain(x) - price of what x occupies)
            + sum over slots of price * capacity,

because the memory of a feasible choice costs at most the last sum. Prices only determine how close the bound is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanlab.offline.belady import occupied
from spanlab.offline.forest import Ints
from spanlab.offline.reuses import Flags, Floats, Reuses


@dataclass(frozen=True)
class Resource:
    """One budget: `capacity` bytes (or entries) in each slot, and the use of it by a reuse.

    `per_token`  of each reused token, while its unit must stay in memory
    `per_reuse`  of each reuse, while the last unit of the reused tokens must stay (a state)
    `per_path`   of each reuse, while the first unit of its path must stay (an entry)
    """

    capacity: Ints
    per_token: int = 0
    per_reuse: int = 0
    per_path: int = 0


@dataclass(frozen=True)
class Gains:
    """Gain of the reuse of a path that ends in a row: with the full node, or with its first unit only.

    Gains between these two must not lie above the straight line; shapes (rows,).
    """

    full: Floats
    first_unit: Floats


def in_tokens(reuses: Reuses) -> Gains:
    """Return gains of one per token."""
    return Gains(reuses.depth.astype(np.float64), (reuses.depth - reuses.tokens + reuses.unit).astype(np.float64))


@dataclass(frozen=True)
class Choice:
    """The optimal choice at given prices: its bound `value`, and its memory `usage`, shape (resources, slots)."""

    value: float
    usage: Floats


class Packing:
    """The reuses and budgets of one run; slots in which everything fits are dropped.

    A path ends in a row with the full node or with its first unit: its price is linear within a node, and gains are
    at most linear, so no length between these is better. The same holds for consecutive nodes that occupy the same
    slots, which are therefore merged into one row.
    """

    def __init__(self, reuses: Reuses, resources: list[Resource], gains: Gains) -> None:
        self.gains, self.tokens, self.unit = gains, reuses.tokens, reuses.unit
        self.first, self.stop = reuses.first, reuses.stop
        self._number(np.concatenate([[True], reuses.path[1:] != reuses.path[:-1]]))
        usage = [(r.per_token, r.per_reuse, r.per_path) for r in resources]
        self.per_token, self.per_reuse, self.per_path = np.array(usage, np.float64).reshape(-1, 3).T
        capacity = [resource.capacity for resource in resources]
        self.capacity = np.array(capacity, np.float64).reshape(-1, reuses.slots)
        self._drop_slots()
        self._merge_rows()

    def _number(self, new: Flags) -> None:
        """Number the paths; `new` marks the first row of each."""
        self.new = new
        self.heads = np.flatnonzero(new)
        self.path = np.cumsum(new) - 1
        self.head = self.heads[self.path]

    def _drop_slots(self) -> None:
        """Keep only slots in which not everything fits; the deepest reuse of a path occupies the most memory."""
        deepest = np.append(self.heads[1:], len(self.path)) - 1
        tight = np.flatnonzero(np.any(self.usage(deepest) > self.capacity, axis=0))
        self.first, self.stop = np.searchsorted(tight, self.first), np.searchsorted(tight, self.stop)
        self.capacity = self.capacity[:, tight]

    def _merge_rows(self) -> None:
        """Merge consecutive rows of a path that occupy the same slots."""
        occupies = self.first < self.stop
        ranges = np.stack([self.first * occupies, self.stop * occupies])
        same = np.concatenate([[False], (ranges[:, 1:] == ranges[:, :-1]).all(axis=0)]) & ~self.new
        starts = np.flatnonzero(~same)
        self.gains = Gains(self.gains.full[np.append(starts[1:], len(same)) - 1], self.gains.first_unit[starts])
        self.tokens = np.add.reduceat(self.tokens, starts)
        self.first, self.stop = ranges[:, starts]
        self._number(self.new[starts])

    @property
    def slots(self) -> int:
        """Number of remaining slots."""
        return int(self.capacity.shape[1])

    def unlimited_gain(self) -> float:
        """Return the gain with unlimited memory."""
        return float(np.maximum(np.maximum.reduceat(self.gains.full, self.heads), 0.0).sum())

    def choose(self, prices: Floats) -> Choice:
        """Return the optimal choice at these prices, shape (resources, slots)."""
        until = np.concatenate([np.zeros((len(prices), 1)), np.cumsum(prices, axis=1)], axis=1)
        span = until[:, self.stop] - until[:, self.first]
        node_price = self.per_token @ span * self.tokens
        above = self._along_path(node_price) - node_price
        fixed = above + self.per_reuse @ span + (self.per_path @ span)[self.head]
        full = self.gains.full - node_price - fixed
        first_unit = self.gains.first_unit - node_price * (self.unit / self.tokens) - fixed
        best = np.maximum(np.maximum.reduceat(np.maximum(full, first_unit), self.heads), 0.0)
        value = float(best.sum() + (prices * self.capacity).sum())
        return Choice(value, self.usage(*self._chosen(full, first_unit, best)))

    def _along_path(self, values: Floats) -> Floats:
        """Return sums from the path's start to each row."""
        total = np.cumsum(values)
        along: Floats = total - (total - values)[self.head]
        return along

    def _chosen(self, full: Floats, first_unit: Floats, best: Floats) -> tuple[Ints, Flags]:
        """Return the last row of each path with a positive gain, and whether only its first unit is reused."""
        is_best = np.maximum(full, first_unit) >= best[self.path]
        rows = (is_best & (best[self.path] > 0)).nonzero()[0]
        rows = rows[np.unique(self.path[rows], return_index=True)[1]]
        return rows, first_unit[rows] > full[rows]

    def usage(self, rows: Ints, first_unit_only: Flags | None = None) -> Floats:
        """Return the memory that reuse up to these rows, one per path, occupies, by resource and slot.

        `first_unit_only`  whether only the first unit of a row is reused
        """
        last = np.full(len(self.heads), -1, np.int64)
        last[self.path[rows]] = rows
        tokens = np.where(np.arange(len(self.path)) <= last[self.path], self.tokens, 0)
        if first_unit_only is not None:
            tokens[rows[first_unit_only]] = self.unit
        ones, heads = np.ones_like(rows), self.head[rows]
        kv = self._occupied(np.arange(len(tokens)), tokens)
        states, entries = self._occupied(rows, ones), self._occupied(heads, ones)
        usage: Floats = np.outer(self.per_token, kv) + np.outer(self.per_reuse, states)
        usage += np.outer(self.per_path, entries)
        return usage

    def _occupied(self, rows: Ints, amount: Ints) -> Ints:
        return occupied(self.first[rows], self.stop[rows], amount, self.slots)

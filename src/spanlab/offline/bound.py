"""Proven upper bounds on the prompt tokens that any cache of a given memory reuses in one run.

The claim covers every policy that stores whole units, counts running requests inside its budget and
admits in the given order, independent of its placement, eviction, admission and knowledge of the
future.

1. A unit can be reused at admission j only if an earlier request had it in its prompt or output,
   and it must have stayed in memory since the last of these stored it: no other request could
   restore it. Where memory for a prompt and its states is reserved at admission, they are stored at
   once. After a preemption, where memory is allocated step by step, and for output tokens that the
   workload contains, storing ends with the request. So the unit occupies memory in every slot
   between that last storing and j. (`reuses`)
2. These ranges of slots are disjoint for one unit, so memory of one slot serves one reuse only.
3. Where it is reserved, the prompt of request s is in memory in slot s too. It shares no unit with
   the ranges that cross the slot, so these fit beside that prompt and its running state.

The reuse of any policy is therefore a set of ranges within these capacities, and the largest such
set is an upper bound. Memory of older running requests, of output tokens and of partly filled units
is ignored, which only loosens the bound. With attention alone the largest set is exact (`belady`).
With recurrent states, or a limit on entries, it is bounded by weak duality (`packing`), at optimal
prices of memory (`linear_program`) or, for runs beyond a limit, at approximate ones (`descent`). It
is also bounded by the exact set for KV with states at no cost. The smaller of the two bounds is
returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import ceil
from typing import Any

import numpy as np

from spanlab.core.request import UNLIMITED, Budget
from spanlab.offline.forest import Flags, Floats, Ints, Reuses
from spanlab.records import NS

# ------------------------------------------------------------------------------
# The largest reuse of equal units under one capacity: evict the farthest next use first, with
# bypass.
#
# Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
# Journal 5 (1966). Each reuse of a unit needs memory of one unit during its interval of slots,
# intervals of one unit do not overlap, and all reuses have the same value. Where intervals
# exceed the capacity, dropping those that end last loses least: a solution that keeps one of
# these and drops an interval with an earlier end stays feasible when the two are exchanged. The
# loop does so slot by slot, which is also optimal for capacities that differ by slot.
#
# Units of one node have one interval, so nodes are counted in units and may be partly stored.
# Prefix closure costs nothing: an ancestor's interval lies within its descendant's and both end
# at the same admission, so the optimum may drop descendants first.
# ------------------------------------------------------------------------------


def most_reused_tokens(reuses: Reuses, capacity_tokens: Ints) -> int:
    """Return the largest reuse in tokens with memory for `capacity_tokens` in each slot, shape
    (n,)."""
    capacity = np.maximum(capacity_tokens, 0) // reuses.unit
    rows = (reuses.stop > reuses.first).nonzero()[0]
    rows = rows[np.argsort(reuses.first[rows], kind="stable")]
    units = reuses.tokens[rows] // reuses.unit
    if fits(reuses.first[rows], reuses.stop[rows], units, capacity):
        return reuses.infinite_tokens
    lost = _lost_units(reuses.first[rows], reuses.stop[rows], units, capacity)
    return reuses.infinite_tokens - lost * reuses.unit


def occupied(first: Ints, stop: Ints, amount: Ints, slots: int) -> Ints:
    """Return, for each slot, the sum of the amounts whose half-open range `[first, stop)` contains
    it."""
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


# ------------------------------------------------------------------------------
# The packing problem behind a bound: how much each path reuses, with memory occupied during
# ranges of slots.
#
# Reuse of x tokens occupies the KV of all of them, one recurrent state and one entry, each
# during its own range of slots. Choosing x for every path is a packing problem, NP-hard with
# two sizes (Berger et al., "Practical Bounds on Optimal Caching with Variable Object Sizes",
# POMACS 2, 2018). Weak duality bounds it: for any prices of memory per slot that are not
# negative,
#
#     gain <= sum over paths of max(0, max over x of gain(x) - price of what x occupies)
#             + sum over slots of price * capacity,
#
# because the memory of a feasible choice costs at most the last sum. Prices only determine how
# close the bound is.
# ------------------------------------------------------------------------------


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
    """Gain of the reuse of a path that ends in a row: with the full node, or with its first unit
    only.

    Gains between these two must not lie above the straight line; shapes (rows,).
    """

    full: Floats
    first_unit: Floats


def in_tokens(reuses: Reuses) -> Gains:
    """Return gains of one per token."""
    return Gains(
        reuses.depth.astype(np.float64),
        (reuses.depth - reuses.tokens + reuses.unit).astype(np.float64),
    )


@dataclass(frozen=True)
class Choice:
    """The optimal choice at given prices: its bound `value`, and its memory `usage`, shape
    (resources, slots)."""

    value: float
    usage: Floats


class Packing:
    """The reuses and budgets of one run; slots in which everything fits are dropped.

    A path ends in a row with the full node or with its first unit: its price is linear within a
    node, and gains are at most linear, so no length between these is better. The same holds for
    consecutive nodes that occupy the same slots, which are therefore merged into one row.
    """

    def __init__(self, reuses: Reuses, resources: list[Resource], gains: Gains) -> None:
        self.gains, self.tokens, self.unit = gains, reuses.tokens, reuses.unit
        self.first, self.stop = reuses.first, reuses.stop
        self._number(np.concatenate([[True], reuses.path[1:] != reuses.path[:-1]]))
        usage = [(r.per_token, r.per_reuse, r.per_path) for r in resources]
        self.per_token, self.per_reuse, self.per_path = np.array(usage, np.float64).reshape(-1, 3).T
        capacity = [resource.capacity for resource in resources]
        self.capacity = np.array(capacity, np.float64).reshape(-1, reuses.slots)
        # keep slots in which not everything fits; the deepest reuse of a path occupies the most
        # memory
        deepest = np.append(self.heads[1:], len(self.path)) - 1
        tight = np.flatnonzero(np.any(self.usage(deepest) > self.capacity, axis=0))
        self.first, self.stop = (
            np.searchsorted(tight, self.first),
            np.searchsorted(tight, self.stop),
        )
        self.capacity = self.capacity[:, tight]
        # merge consecutive rows of a path that occupy the same slots
        occupies = self.first < self.stop
        ranges = np.stack([self.first * occupies, self.stop * occupies])
        same = np.concatenate([[False], (ranges[:, 1:] == ranges[:, :-1]).all(axis=0)]) & ~self.new
        starts = np.flatnonzero(~same)
        self.gains = Gains(
            self.gains.full[np.append(starts[1:], len(same)) - 1], self.gains.first_unit[starts]
        )
        self.tokens = np.add.reduceat(self.tokens, starts)
        self.first, self.stop = ranges[:, starts]
        self._number(self.new[starts])

    def _number(self, new: Flags) -> None:
        """Number the paths; `new` marks the first row of each."""
        self.new = new
        self.heads = np.flatnonzero(new)
        self.path = np.cumsum(new) - 1
        self.head = self.heads[self.path]

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
        # sums from the path's start to each row
        total = np.cumsum(node_price)
        along: Floats = total - (total - node_price)[self.head]
        above = along - node_price
        fixed = above + self.per_reuse @ span + (self.per_path @ span)[self.head]
        full = self.gains.full - node_price - fixed
        first_unit = self.gains.first_unit - node_price * (self.unit / self.tokens) - fixed
        best = np.maximum(np.maximum.reduceat(np.maximum(full, first_unit), self.heads), 0.0)
        value = float(best.sum() + (prices * self.capacity).sum())
        # the last row of each path with a positive gain, and whether only its first unit is reused
        is_best = np.maximum(full, first_unit) >= best[self.path]
        rows = (is_best & (best[self.path] > 0)).nonzero()[0]
        rows = rows[np.unique(self.path[rows], return_index=True)[1]]
        return Choice(value, self.usage(rows, first_unit[rows] > full[rows]))

    def usage(self, rows: Ints, first_unit_only: Flags | None = None) -> Floats:
        """Return the memory that reuse up to these rows, one per path, occupies, by resource and
        slot.

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


# ------------------------------------------------------------------------------
# Prices of memory by subgradient descent: fast at any size, and approximate.
# ------------------------------------------------------------------------------

_SCALES = 24  # number of uniform start prices, each half of the previous one
_ROUNDS = 120
# share by which one step aims to lower the bound; halved after steps without success
_TARGET = 0.03
_PATIENCE = 5  # steps without success before it is halved
_MOMENTUM = 0.7


@dataclass(frozen=True)
class _Point:
    """Prices, the bound at these prices, its slope by price, and the direction of the last step."""

    prices: Floats
    value: float
    slope: Floats
    direction: Floats


def descend(packing: Packing) -> float:
    """Return the least bound found, by subgradient steps of Polyak's length with momentum."""
    # the best of several prices, uniform over slots, at which all resources cost the same in total
    total = np.maximum(packing.capacity.sum(axis=1, keepdims=True), 1.0)
    scale = packing.unlimited_gain() / total / len(total)
    none = np.zeros_like(packing.capacity)
    points = [_point(packing, none + scale * 0.5**i, none) for i in range(_SCALES)]
    point = best = min(points, key=lambda point: point.value)
    target, stalled = _TARGET, 0
    for _ in range(_ROUNDS):
        point = _step(packing, point, best.value * (1 - target))
        if point.value < best.value:
            best, stalled = point, 0
            continue
        stalled += 1
        if stalled == _PATIENCE:
            point, target, stalled = replace(best, direction=0 * best.direction), target / 2, 0
    return best.value


def _step(packing: Packing, point: _Point, target: float) -> _Point:
    """Return the point where a bound of this slope would reach the target; prices stay
    non-negative."""
    direction = point.slope + _MOMENTUM * point.direction
    moving = np.where((point.prices <= 0) & (direction > 0), 0.0, direction)
    length = (point.value - target) / max(float((moving**2).sum()), 1e-300)
    return _point(packing, np.maximum(point.prices - length * moving, 0.0), direction)


def _point(packing: Packing, prices: Floats, direction: Floats) -> _Point:
    choice = packing.choose(prices)
    return _Point(prices, choice.value, packing.capacity - choice.usage, direction)


# ------------------------------------------------------------------------------
# Optimal prices of memory: the dual of a flow of reuses through the slots, solved by SciPy's
# HiGHS.
#
# The least bound over all prices is the linear relaxation of the packing, in which a path may
# be reused in fractions. The relaxation is a flow: u(r) is the share of a path that reaches row
# r, p(r) the share that ends with the first unit of r, and the memory in use flows from slot to
# slot, more where ranges begin and less where they stop. So its matrix grows with the rows and
# the slots, independent of the length of the ranges (FOO in Berger et al., POMACS 2, 2018, with
# several resources).
#
#     max  sum of (full(r) - full(r - 1)) · u(r) - (full(r) - first(r)) · p(r)
#     where u(r + 1) + p(r) <= u(r) <= 1, and the memory in use in each slot is between 0 and the
#     capacity
#
# with full(r) and first(r) the gains of reuse that ends with all of row r, and with its first
# unit.
#
# KV of row r is in use for the share u(r) - p(r) of its node and p(r) of one unit, a state for
# u(r) - u(r + 1).
# ------------------------------------------------------------------------------


def best_prices(packing: Packing) -> Floats:
    """Return prices of the least bound, shape (resources, slots), within the solver's tolerance."""
    from scipy import sparse
    from scipy.optimize import linprog

    rows, used = len(packing.path), packing.capacity.size
    # the gain per share of u, then of p, shape (2 · rows,)
    full, first_unit = packing.gains.full, packing.gains.first_unit
    above = np.where(packing.new, 0.0, np.concatenate([[0.0], full[:-1]]))
    gains = np.concatenate([full - above, first_unit - full])
    # each resource is scaled by its largest use by one row
    used_by_row = packing.per_token * packing.tokens.max() + packing.per_reuse + packing.per_path
    scale = np.maximum(used_by_row, 1.0)[:, None]
    largest = max(float(np.abs(gains).max()), 1e-300)
    capacity = (packing.capacity / scale).ravel()
    ends = sparse.hstack([_ends(packing), sparse.coo_matrix((rows, used))])
    # memory in use in the previous slot less this one, (resources · slots, resources · slots)
    slots = packing.slots
    block = sparse.diags([-np.ones(slots), np.ones(slots - 1)], [0, -1], shape=(slots, slots))
    carried = sparse.block_diag([block] * len(packing.capacity))
    flow = sparse.hstack([_flow(packing, scale), carried])
    solved = linprog(
        np.concatenate([-gains / largest, np.zeros(used)]),
        A_ub=ends.tocsr(),
        b_ub=np.zeros(rows),
        A_eq=flow.tocsr(),
        b_eq=np.zeros(used),
        bounds=np.column_stack(
            [np.zeros(2 * rows + used), np.concatenate([np.ones(2 * rows), capacity])]
        ),
        method="highs-ds",
    )
    assert solved.status == 0, f"reusing nothing is feasible and gains are finite: {solved.message}"
    marginal = -solved.upper.marginals[2 * rows :].reshape(packing.capacity.shape)
    prices: Floats = np.maximum(marginal, 0.0) * largest / scale
    return prices


def _ends(packing: Packing) -> Any:
    """Return the matrix of u(r + 1) + p(r) - u(r), shape (rows, 2 · rows)."""
    from scipy import sparse

    rows = np.arange(len(packing.path))
    follows = rows[~packing.new]
    values = np.concatenate([-np.ones(len(rows)), np.ones(len(follows)), np.ones(len(rows))])
    indices = (
        np.concatenate([rows, follows - 1, rows]),
        np.concatenate([rows, follows, len(rows) + rows]),
    )
    return sparse.coo_matrix((values, indices), shape=(len(rows), 2 * len(rows)))


def _flow(packing: Packing, scale: Floats) -> Any:
    """Return the matrix of the change of memory in use by resource and slot, shape (resources ·
    slots, 2 · rows)."""
    from scipy import sparse

    rows, tokens = np.arange(len(packing.path)), packing.tokens
    follows, unit = rows[~packing.new], packing.unit
    matrices = []
    for resource in range(len(packing.capacity)):
        per_token, per_reuse = packing.per_token[resource], packing.per_reuse[resource]
        reached = per_token * tokens + per_reuse + packing.per_path[resource] * packing.new
        # columns, their use of the resource, and the rows in whose ranges they use it
        columns = np.concatenate([rows, follows, len(rows) + rows])
        amounts = np.concatenate(
            [reached, np.full(len(follows), -per_reuse), -per_token * (tokens - unit)]
        )
        ranges = np.concatenate([rows, follows - 1, rows])
        matrices.append(_changes(packing, columns, amounts / scale[resource], ranges))
    return sparse.vstack(matrices)


def _changes(packing: Packing, columns: Ints, amounts: Floats, ranges: Ints) -> Any:
    """Return the matrix that adds amounts where ranges begin and subtracts them where they stop,
    (slots, 2 · rows)."""
    from scipy import sparse

    first, stop = packing.first[ranges], packing.stop[ranges]
    begins = (amounts != 0) & (first < stop)
    ends = begins & (stop < packing.slots)
    values = np.concatenate([amounts[begins], -amounts[ends]])
    indices = (
        np.concatenate([first[begins], stop[ends]]),
        np.concatenate([columns[begins], columns[ends]]),
    )
    return sparse.coo_matrix((values, indices), shape=(packing.slots, 2 * len(packing.path)))


# ------------------------------------------------------------------------------
# A bound on reuse that needs several resources at once (KV, states, entries), by prices of
# memory.
# ------------------------------------------------------------------------------

#: Rows + slots × resources up to which prices come from the linear program: two seconds or less.
LIMIT = 8_000
#: Method of a bound: everything fits, only equal units compete, optimal prices, or prices of a
#: descent.
INFINITE, UNITS, PROGRAM, DESCENT = "infinite", "units", "linear_program", "descent"


@dataclass(frozen=True)
class PricedBound:
    """A proven bound, and the method of its prices."""

    value: float
    method: str


def bound_gain(
    reuses: Reuses, resources: list[Resource], gains: Gains, limit: int = LIMIT
) -> PricedBound:
    """Return an upper bound on the gain of any choice within the resources.

    The bound is evaluated at the solver's prices, so it holds for any tolerance of the solver.
    """
    if not len(reuses.tokens):
        return PricedBound(0.0, INFINITE)
    packing = Packing(reuses, resources, gains)
    if not packing.slots:
        return PricedBound(packing.unlimited_gain(), INFINITE)
    if len(packing.path) + packing.capacity.size > limit:
        return PricedBound(min(descend(packing), packing.unlimited_gain()), DESCENT)
    return PricedBound(
        min(packing.choose(best_prices(packing)).value, packing.unlimited_gain()), PROGRAM
    )


def priced_tokens(reuses: Reuses, resources: list[Resource], limit: int = LIMIT) -> tuple[int, str]:
    """Return an upper bound on the tokens of any choice, in whole units, and its method."""
    bound = bound_gain(reuses, resources, in_tokens(reuses), limit)
    return int(bound.value / reuses.unit + 1e-6) * reuses.unit, bound.method


@dataclass(frozen=True)
class CacheMemory:
    """A budget, and the bytes of a stored token and of a stored state.

    `state_bytes`  0 for a model without recurrent layers
    """

    budget: Budget
    token_bytes: int
    state_bytes: int = 0


@dataclass(frozen=True)
class OfflineBound:
    """A bound on the reused tokens of any cache with a memory, and its method (`pricing`)."""

    tokens: int
    method: str


def offline_bound(reuses: Reuses, memory: CacheMemory, limit: int = LIMIT) -> OfflineBound:
    """Return the bound; it is exact where only units compete for memory.

    `limit`  size of a run above which the prices of memory are approximate
    """
    # the tokens of other prompts that fit beside the slot's prompt
    budget = memory.budget
    if not memory.token_bytes:
        room_for_kv = np.full(reuses.slots, UNLIMITED)
    else:
        unreserved = budget.total_bytes - memory.state_bytes * reuses.running
        room_for_kv = (
            np.minimum(budget.kv_bytes, unreserved) // memory.token_bytes - reuses.prompt_tokens
        )
    kv_alone = most_reused_tokens(reuses, room_for_kv)
    resources = resources_of(reuses, memory)
    if not resources or (not memory.state_bytes and memory.budget.entries >= UNLIMITED):
        return OfflineBound(kv_alone, UNITS)
    tokens, method = priced_tokens(reuses, resources, limit)
    return OfflineBound(min(kv_alone, tokens), method)


def resources_of(reuses: Reuses, memory: CacheMemory) -> list[Resource]:
    """Return the limited budgets, less the memory of each slot's request."""
    budget, token, state = memory.budget, memory.token_bytes, memory.state_bytes
    kv, running_state = token * reuses.prompt_tokens, state * reuses.running
    limits = (
        (budget.kv_bytes, Resource(budget.kv_bytes - kv, token)),
        (budget.state_bytes, Resource(budget.state_bytes - running_state, 0, state)),
        (budget.total_bytes, Resource(budget.total_bytes - kv - running_state, token, state)),
        (budget.entries, Resource(np.full_like(kv, budget.entries), per_path=1)),
    )
    return [
        replace(used, capacity=np.maximum(used.capacity, 0))
        for limit, used in limits
        if limit < UNLIMITED
    ]


# ------------------------------------------------------------------------------
# A proven lower bound on the mean TTFT of a run: the best use of its memory, without queueing.
#
# A request that reuses x of its P prompt tokens needs T(x) >= max(C(x), M) from its arrival to
# its first token: C(x) is the time to compute tokens [x, P) alone, M one step. Times are whole
# nanoseconds: the time to compute is rounded down, so C(x) = that time before rounding, less
# one. C falls with x, and faster for larger x, as late tokens attend to more keys. The saving
# T(0) - T(x) is therefore at most C(0) - C(x) up to the x where C(x) reaches M, and constant
# beyond. The largest sum of savings over reuses that fit the memory is bounded like the largest
# sum of tokens (`packing`): within a node savings lie below their chord, because C(0) - C(x) is
# convex. So
#
#     sum of TTFT >= sum of max(C(0), M) - that bound,
#
# rounded up to a whole number. A request without useful reuse takes the rounded time itself
# instead of C(0). Queueing, concurrent decoding, chunks and loads only increase TTFT. The bound
# does not estimate TTFT under load.
# ------------------------------------------------------------------------------

ERROR = 1e-12  # of sums in float64, relative to the sum of all times


@dataclass(frozen=True)
class Prefill:
    """Prompts of a run by slot, and the time to compute their tokens.

    `prompt_tokens`  shape (n,)
    `counted`        whether the TTFT of a slot's request counts
    `computing`      nanoseconds to compute tokens `[start, stop)` alone, before they are rounded
                     down
    `step_ns`        nanoseconds of the shortest step
    """

    prompt_tokens: Ints
    counted: Flags
    computing: Callable[[Ints, Ints], Floats]
    step_ns: int

    def saved(self, reused: Ints, slot: Ints) -> Floats:
        """Return the seconds saved by reuse of the first `reused` tokens of a slot's prompt."""
        none, prompt = np.zeros_like(reused), self.prompt_tokens[slot]
        saved: Floats = self.computing(none, prompt) - self.computing(reused, prompt)
        return saved * NS

    def useful_tokens(self, unit: int) -> Ints:
        """Return the tokens of each prompt, in whole units, beyond which reuse saves no time, shape
        (n,)."""
        low, high = np.zeros_like(self.prompt_tokens), -(-self.prompt_tokens // unit)
        while (low < high).any():
            middle = (low + high) // 2
            start = np.minimum(middle * unit, self.prompt_tokens)
            fits_step = self.computing(start, self.prompt_tokens) - 1 <= self.step_ns
            low = np.where(fits_step, low, np.minimum(middle + 1, high))
            high = np.where(fits_step, middle, high)
        return low * unit


def least_ttft(reuses: Reuses, memory: CacheMemory, prefill: Prefill) -> PricedBound:
    """Return a lower bound on TTFT in whole nanoseconds, summed over counted requests, for any
    cache of this memory."""
    # the reuses that save time: nodes up to the useful depth, with the last one truncated there
    above, limit = reuses.depth - reuses.tokens, prefill.useful_tokens(reuses.unit)[reuses.stop]
    saves = above < limit
    depth = np.minimum(reuses.depth, limit)[saves]
    rows = {name: getattr(reuses, name)[saves] for name in ("first", "stop", "path")}
    useful = replace(reuses, depth=depth, tokens=depth - above[saves], **rows)
    computing = prefill.computing(np.zeros_like(prefill.prompt_tokens), prefill.prompt_tokens)
    saves = np.zeros(len(computing), np.bool_)
    saves[useful.stop] = True
    alone = np.maximum(np.where(saves, computing - 1, np.floor(computing)), prefill.step_ns)[
        prefill.counted
    ]
    if not len(useful.tokens):
        return PricedBound(int(alone.sum()), INFINITE)
    first_unit = useful.depth - useful.tokens + useful.unit
    gains = Gains(prefill.saved(useful.depth, useful.stop), prefill.saved(first_unit, useful.stop))
    saved = bound_gain(useful, resources_of(reuses, memory), gains, LIMIT)
    total = alone.sum() * (1 - ERROR) - saved.value / NS
    return PricedBound(max(ceil(total), len(alone) * prefill.step_ns), saved.method)

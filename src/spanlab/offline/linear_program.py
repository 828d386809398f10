"""Optimal prices of memory: the dual of a flow of reuses through the slots, solved by SciPy's HiGHS.

The least bound over all prices is the linear relaxation of the packing, in which a path may be reused in fractions. The
relaxation is a flow: u(r) is the share of a path that reaches row r, p(r) the share that ends with the first unit of r,
and the memory in use flows from slot to slot, more where ranges begin and less where they stop. So its matrix grows
with the rows and the slots, independent of the length of the ranges (FOO in Berger et al., POMACS 2, 2018, with several
resources).

    max  sum of (full(r) - full(r - 1)) · u(r) - (full(r) - first(r)) · p(r)
    where u(r + 1) + p(r) <= u(r) <= 1, and the memory in use in each slot is between 0 and the capacity

with full(r) and first(r) the gains of reuse that ends with all of row r, and with its first unit.

KV of row r is in use for the share u(r) - p(r) of its node and p(r) of one unit, a state for u(r) - u(r + 1).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spanlab.offline.forest import Ints
from spanlab.offline.packing import Packing
from spanlab.offline.reuses import Floats


def best_prices(packing: Packing) -> Floats:
    """Return prices of the least bound, shape (resources, slots), within the solver's tolerance."""
    from scipy import sparse
    from scipy.optimize import linprog

    rows, used = len(packing.path), packing.capacity.size
    gains, scale = _objective(packing), _scale(packing)[:, None]
    largest = max(float(np.abs(gains).max()), 1e-300)
    capacity = (packing.capacity / scale).ravel()
    ends = sparse.hstack([_ends(packing), sparse.coo_matrix((rows, used))])
    flow = sparse.hstack([_flow(packing, scale), _carry_over(packing)])
    solved = linprog(
        np.concatenate([-gains / largest, np.zeros(used)]),
        A_ub=ends.tocsr(),
        b_ub=np.zeros(rows),
        A_eq=flow.tocsr(),
        b_eq=np.zeros(used),
        bounds=np.column_stack([np.zeros(2 * rows + used), np.concatenate([np.ones(2 * rows), capacity])]),
        method="highs-ds",
    )
    assert solved.status == 0, f"reusing nothing is feasible and gains are finite: {solved.message}"
    marginal = -solved.upper.marginals[2 * rows :].reshape(packing.capacity.shape)
    prices: Floats = np.maximum(marginal, 0.0) * largest / scale
    return prices


def _objective(packing: Packing) -> Floats:
    """Return the gain per share of u, then of p, shape (2 · rows,)."""
    full, first_unit = packing.gains.full, packing.gains.first_unit
    above = np.where(packing.new, 0.0, np.concatenate([[0.0], full[:-1]]))
    return np.concatenate([full - above, first_unit - full])


def _scale(packing: Packing) -> Floats:
    """Return the largest use of each resource by one row."""
    largest = packing.per_token * packing.tokens.max() + packing.per_reuse + packing.per_path
    scale: Floats = np.maximum(largest, 1.0)
    return scale


def _ends(packing: Packing) -> Any:
    """Return the matrix of u(r + 1) + p(r) - u(r), shape (rows, 2 · rows)."""
    from scipy import sparse

    rows = np.arange(len(packing.path))
    follows = rows[~packing.new]
    values = np.concatenate([-np.ones(len(rows)), np.ones(len(follows)), np.ones(len(rows))])
    indices = np.concatenate([rows, follows - 1, rows]), np.concatenate([rows, follows, len(rows) + rows])
    return sparse.coo_matrix((values, indices), shape=(len(rows), 2 * len(rows)))


def _flow(packing: Packing, scale: Floats) -> Any:
    """Return the matrix of the change of memory in use by resource and slot, shape (resources · slots, 2 · rows)."""
    from scipy import sparse

    rows, tokens = np.arange(len(packing.path)), packing.tokens
    follows, unit = rows[~packing.new], packing.unit
    matrices = []
    for resource in range(len(packing.capacity)):
        per_token, per_reuse = packing.per_token[resource], packing.per_reuse[resource]
        reached = per_token * tokens + per_reuse + packing.per_path[resource] * packing.new
        # columns, their use of the resource, and the rows in whose ranges they use it
        columns = np.concatenate([rows, follows, len(rows) + rows])
        amounts = np.concatenate([reached, np.full(len(follows), -per_reuse), -per_token * (tokens - unit)])
        ranges = np.concatenate([rows, follows - 1, rows])
        matrices.append(_changes(packing, columns, amounts / scale[resource], ranges))
    return sparse.vstack(matrices)


def _changes(packing: Packing, columns: Ints, amounts: Floats, ranges: Ints) -> Any:
    """Return the matrix that adds amounts where ranges begin and subtracts them where they stop, (slots, 2 · rows)."""
    from scipy import sparse

    first, stop = packing.first[ranges], packing.stop[ranges]
    begins = (amounts != 0) & (first < stop)
    ends = begins & (stop < packing.slots)
    values = np.concatenate([amounts[begins], -amounts[ends]])
    indices = np.concatenate([first[begins], stop[ends]]), np.concatenate([columns[begins], columns[ends]])
    return sparse.coo_matrix((values, indices), shape=(packing.slots, 2 * len(packing.path)))


def _carry_over(packing: Packing) -> Any:
    """Return the matrix of memory in use in the previous slot less this one, (resources · slots, resources · slots)."""
    from scipy import sparse

    slots = packing.slots
    block = sparse.diags([-np.ones(slots), np.ones(slots - 1)], [0, -1], shape=(slots, slots))
    return sparse.block_diag([block] * len(packing.capacity))

"""The best prices of memory: the dual of a flow of reuses through the slots, solved by SciPy's HiGHS.

The least bound over all prices is the linear relaxation of the packing, in which a path may be reused in shares. The
relaxation is a flow: u(r) is the share of a path that reaches row r, p(r) the share that ends with the first unit of r,
and the memory in use goes from slot to slot, more where ranges begin and less where they stop. So its matrix grows with
the rows and the slots, however long the ranges are (FOO in Berger et al., POMACS 2, 2018, with several resources).

    max  sum of (whole(r) - whole(r - 1)) · u(r) - (whole(r) - part(r)) · p(r)
    where u(r + 1) + p(r) <= u(r) <= 1, and what is in use in each slot is between 0 and the capacity

KV of row r is in use for the share u(r) - p(r) of its node and p(r) of one unit, a state for u(r) - u(r + 1).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spanlab.offline.forest import Ints
from spanlab.offline.packing import Packing
from spanlab.offline.reuses import Floats


def best_prices(packing: Packing) -> Floats:
    """Prices of the least bound, shape (resources, slots), to within the solver's tolerance."""
    from scipy import sparse
    from scipy.optimize import linprog

    rows, used = len(packing.path), packing.capacity.size
    worth, scale = _worth(packing), _scale(packing)[:, None]
    most = max(float(np.abs(worth).max()), 1e-300)
    capacity = (packing.capacity / scale).ravel()
    ends = sparse.hstack([_ends(packing), sparse.coo_matrix((rows, used))])
    flow = sparse.hstack([_flow(packing, scale), _kept(packing)])
    solved = linprog(
        np.concatenate([-worth / most, np.zeros(used)]),
        A_ub=ends.tocsr(),
        b_ub=np.zeros(rows),
        A_eq=flow.tocsr(),
        b_eq=np.zeros(used),
        bounds=np.column_stack([np.zeros(2 * rows + used), np.concatenate([np.ones(2 * rows), capacity])]),
        method="highs-ds",
    )
    assert solved.status == 0, f"reusing nothing is feasible and gains are finite: {solved.message}"
    marginal = -solved.upper.marginals[2 * rows :].reshape(packing.capacity.shape)
    prices: Floats = np.maximum(marginal, 0.0) * most / scale
    return prices


def _worth(packing: Packing) -> Floats:
    """Of one share of u, then of p."""
    whole, part = packing.gains.whole, packing.gains.part
    above = np.where(packing.new, 0.0, np.concatenate([[0.0], whole[:-1]]))
    return np.concatenate([whole - above, part - whole])


def _scale(packing: Packing) -> Floats:
    """The most that one row takes of each resource."""
    most = packing.per_token * packing.reuses.tokens.max() + packing.per_reuse + packing.per_path
    scale: Floats = np.maximum(most, 1.0)
    return scale


def _ends(packing: Packing) -> Any:
    """u(r + 1) + p(r) - u(r), shape (rows, 2 · rows)."""
    from scipy import sparse

    rows = np.arange(len(packing.path))
    follows = rows[~packing.new]
    values = np.concatenate([-np.ones(len(rows)), np.ones(len(follows)), np.ones(len(rows))])
    at = np.concatenate([rows, follows - 1, rows]), np.concatenate([rows, follows, len(rows) + rows])
    return sparse.coo_matrix((values, at), shape=(len(rows), 2 * len(rows)))


def _flow(packing: Packing, scale: Floats) -> Any:
    """What begins less what stops in each slot, by resource: shape (resources · slots, 2 · rows)."""
    from scipy import sparse

    rows, tokens = np.arange(len(packing.path)), packing.reuses.tokens
    follows, unit = rows[~packing.new], packing.reuses.unit
    parts = []
    for at in range(len(packing.capacity)):
        per_token, per_reuse, per_path = packing.per_token[at], packing.per_reuse[at], packing.per_path[at]
        reached = per_token * tokens + per_reuse + per_path * packing.new
        # columns, what they take, and the rows in whose ranges they take it
        columns = np.concatenate([rows, follows, len(rows) + rows])
        taken = np.concatenate([reached, np.full(len(follows), -per_reuse), -per_token * (tokens - unit)])
        ranges = np.concatenate([rows, follows - 1, rows])
        parts.append(_changes(packing, columns, taken / scale[at], ranges))
    return sparse.vstack(parts)


def _changes(packing: Packing, columns: Ints, taken: Floats, ranges: Ints) -> Any:
    """What columns add in the slots where ranges begin, and take away where these stop: shape (slots, 2 · rows)."""
    from scipy import sparse

    first, stop = packing.first[ranges], packing.stop[ranges]
    begins = (taken != 0) & (first < stop)
    ends = begins & (stop < packing.slots)
    values = np.concatenate([taken[begins], -taken[ends]])
    at = np.concatenate([first[begins], stop[ends]]), np.concatenate([columns[begins], columns[ends]])
    return sparse.coo_matrix((values, at), shape=(packing.slots, 2 * len(packing.path)))


def _kept(packing: Packing) -> Any:
    """What was in use in the slot before, less what is: shape (resources · slots, resources · slots)."""
    from scipy import sparse

    slots = packing.slots
    one = sparse.diags([-np.ones(slots), np.ones(slots - 1)], [0, -1], shape=(slots, slots))
    return sparse.block_diag([one] * len(packing.capacity))

"""The requests of two runs of an arm, paired by seed and request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.analysis.bootstrap import Clusters

Columns = dict[str, NDArray[Any]]

#: Fields that must be equal within a pair.
_SAME_REQUEST = ("group_id", "prompt_tokens", "output_tokens")
_CLOSE_S = 1e-9  # times are whole nanoseconds, stored as seconds


class UnpairedError(ValueError):
    """Two runs whose requests cannot be paired; the message is the reason."""


@dataclass(frozen=True)
class Pairs:
    """Requests that both runs counted, in one order.

    first, other  fields of records, each of shape (n,)
    """

    first: Columns
    other: Columns

    @property
    def seeds(self) -> int:
        """Number of seeds with pairs."""
        return len(np.unique(self.first["seed"]))

    def clusters(self) -> Clusters:
        """Return clusters of the pairs by seed and group."""
        return Clusters.of(self.first["seed"], self.first["group_id"])


def paired(first: Columns, other: Columns) -> Pairs:
    """Return the paired requests of the seeds that both runs have.

    Raise UnpairedError where no seed is common, or where requests or arrival times of a common seed differ.
    """
    seeds = np.intersect1d(first["seed"], other["seed"])
    if not seeds.size:
        raise UnpairedError("no common seed")
    a, b = (_sorted(columns, seeds) for columns in (first, other))
    if not np.array_equal(a["request_id"], b["request_id"]) or not np.array_equal(a["seed"], b["seed"]):
        raise UnpairedError("requests differ")
    if any(not np.array_equal(a[name], b[name]) for name in _SAME_REQUEST):
        raise UnpairedError("requests differ")
    if not np.allclose(a["arrived_s"], b["arrived_s"], rtol=0, atol=_CLOSE_S):
        raise UnpairedError("arrivals differ")
    counted = a["counted"].astype(bool) & b["counted"].astype(bool)
    if not counted.any():
        raise UnpairedError("no request is counted in both")
    return Pairs(_select(a, counted), _select(b, counted))


def _sorted(columns: Columns, seeds: NDArray[Any]) -> Columns:
    selected = _select(columns, np.isin(columns["seed"], seeds))
    return _select(selected, np.lexsort((selected["request_id"], selected["seed"])))


def _select(columns: Columns, rows: NDArray[Any]) -> Columns:
    return {name: values[rows] for name, values in columns.items()}

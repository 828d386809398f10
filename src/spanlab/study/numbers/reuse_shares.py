"""Token hit rates: over all tokens, as a mean over requests, and by halves of a run."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Columns = dict[str, NDArray[Any]]


def reuse_shares(columns: Columns) -> dict[str, float | list[float]]:
    """Token hit rates of an arm, in three definitions.

    `token_hit_rate`          ratio of sums: reused ÷ prompt tokens of all requests
    `token_hit_rate_mean`     mean of ratios: reused ÷ prompt tokens of each request, with equal weights
    `token_hit_rate_halves`   ratio of sums in the first and the second half of each seed's requests, by arrival: the
                              first half includes the start on an empty cache
    """
    prompt, reused = columns["prompt_tokens"], columns["reused_tokens"]
    late = _second_half(columns["arrived_s"], columns["seed"])
    return {
        "token_hit_rate": _ratio(reused, prompt),
        "token_hit_rate_mean": float(np.mean(reused / prompt)),
        "token_hit_rate_halves": [_ratio(reused[half], prompt[half]) for half in (~late, late)],
    }


def _ratio(numerator: NDArray[Any], denominator: NDArray[Any]) -> float:
    total = int(denominator.sum())
    return int(numerator.sum()) / total if total else 0.0


def _second_half(arrived_s: NDArray[np.float64], seeds: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mask of the requests in the second half of their seed, by arrival, including the middle one."""
    late = np.zeros(len(seeds), dtype=np.bool_)
    for seed in np.unique(seeds):
        rows = np.flatnonzero(seeds == seed)
        in_order = rows[np.argsort(arrived_s[rows], kind="stable")]
        late[in_order[len(rows) // 2 :]] = True
    return late

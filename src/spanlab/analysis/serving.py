"""Metrics of serving by the names and definitions of vLLM's benchmark (`vllm/benchmarks/serve.py`).

TTFT is first token − arrival, E2E last token − arrival, TPOT (last − first token) ÷ (tokens − 1) of requests with two
tokens or more, ITL every gap between successive tokens. Standard deviations are those of a population, percentiles are
linear, and rates are per second from the first arrival to the last token. Arrivals are the intended ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Columns = Mapping[str, NDArray[Any]]
Values = dict[str, float]

PERCENTILES = (90, 95, 99)
_MS = 1e3
_MS_PER_NS = 1e-6


@dataclass(frozen=True)
class Gaps:
    """Gaps between tokens, nanoseconds in ascending order, and the number of occurrences; both of shape (n,)."""

    gap_ns: NDArray[np.int64]
    count: NDArray[np.int64]


@dataclass(frozen=True)
class Goal:
    """Limits of one request in seconds; infinity means no limit."""

    ttft_s: float
    tpot_s: float
    e2e_s: float


def serving_values(columns: Columns, gaps: Gaps | None, goals: Mapping[str, Goal]) -> Values:
    """Return every metric of the counted requests of one run by name; metrics without data are absent.

    `columns` are fields of records, at least those that a client observes.
    """
    arrived, first, last = (columns[f"{name}_s"] for name in ("arrived", "first_token", "finished"))
    tokens = columns["output_tokens"]
    several = tokens > 1
    tpot = (last - first)[several] / (tokens[several] - 1)
    values = _rates(columns, float(last.max() - arrived.min()))
    values |= (
        spread("ttft", (first - arrived) * _MS) | spread("tpot", tpot * _MS) | spread("e2el", (last - arrived) * _MS)
    )
    if gaps is not None:
        values |= _gap_spread(gaps)
    if "admitted_s" in columns:
        values |= spread("queue", (columns["admitted_s"] - arrived) * _MS)
    values |= _goodput(columns, goals)
    return values | _reuse(columns)


def _rates(columns: Columns, duration_s: float) -> Values:
    prompt, output = (int(columns[f"{name}_tokens"].sum()) for name in ("prompt", "output"))
    counts: Values = {
        "completed": len(columns["prompt_tokens"]),
        "duration": duration_s,
        "total_input_tokens": prompt,
        "total_output_tokens": output,
    }
    if duration_s <= 0:
        return counts
    return counts | {
        "request_throughput": counts["completed"] / duration_s,
        "output_throughput": output / duration_s,
        "total_token_throughput": (prompt + output) / duration_s,
    }


def spread(name: str, values_ms: Floats) -> Values:
    """Return mean, median, standard deviation and percentiles with vLLM's names; empty for no values."""
    if not len(values_ms):
        return {}
    statistics = {
        f"mean_{name}_ms": float(values_ms.mean()),
        f"median_{name}_ms": float(np.median(values_ms)),
        f"std_{name}_ms": float(values_ms.std()),
    }
    tails = np.percentile(values_ms, PERCENTILES).tolist()
    return statistics | {f"p{percent}_{name}_ms": tail for percent, tail in zip(PERCENTILES, tails, strict=True)}


def _gap_spread(gaps: Gaps) -> Values:
    """Return the same statistics as `spread` of the individual gaps."""
    total = int(gaps.count.sum())
    if not total:
        return {}
    values: Floats = gaps.gap_ns.astype(np.float64) * _MS_PER_NS
    weights = gaps.count / total
    mean = float(values @ weights)
    statistics = {
        "mean_itl_ms": mean,
        "median_itl_ms": pooled_percentile(values, gaps.count, 50),
        "std_itl_ms": float(np.sqrt((values - mean) ** 2 @ weights)),
    }
    return statistics | {
        f"p{percent}_itl_ms": pooled_percentile(values, gaps.count, percent) for percent in PERCENTILES
    }


def pooled_percentile(values: Floats, counts: NDArray[np.int64], percent: float) -> float:
    """Return the linear percentile of ascending values that occur `counts` times each."""
    ends = np.cumsum(counts)
    position = (int(ends[-1]) - 1) * percent / 100
    below, above = values[np.searchsorted(ends, [np.floor(position), np.ceil(position)], side="right")].tolist()
    return float(below + (above - below) * (position - np.floor(position)))


def _goodput(columns: Columns, goals: Mapping[str, Goal]) -> Values:
    """Return requests per second that meet all limits of a goal, and their share."""
    arrived, first, last = (columns[f"{name}_s"] for name in ("arrived", "first_token", "finished"))
    tokens, duration_s = columns["output_tokens"], float(last.max() - arrived.min())
    tpot = (last - first) / np.maximum(tokens - 1, 1)  # 0 for a single token
    values: Values = {}
    for name, goal in goals.items():
        good = (first - arrived <= goal.ttft_s) & (tpot <= goal.tpot_s) & (last - arrived <= goal.e2e_s)
        values[f"slo_attainment:{name}"] = float(good.mean())
        if duration_s > 0:
            values[f"request_goodput:{name}"] = int(good.sum()) / duration_s
    return values


def _reuse(columns: Columns) -> Values:
    reused = columns["reused_tokens"]
    if np.isnan(reused).any():  # the server does not report reuse
        return {}
    return {"token_hit_rate": float(reused.sum() / columns["prompt_tokens"].sum())}


@dataclass(frozen=True)
class Queues:
    """Numbers of requests that wait for first admission and that run, after every change; arrays of shape (n,).

    A preempted request counts as running.
    """

    time_s: Floats
    waiting: NDArray[np.int64]
    running: NDArray[np.int64]

    def values(self) -> Values:
        """Return maxima, and means over the time from zero to the last token."""
        gaps, end = np.diff(self.time_s), float(self.time_s[-1])
        metrics: Values = {}
        for name, counts in (("waiting", self.waiting), ("running", self.running)):
            metrics[f"max_{name}"] = int(counts.max())
            if end > 0:
                metrics[f"mean_{name}"] = float(gaps @ counts[:-1]) / end
        return metrics


def queues(columns: Columns) -> Queues:
    """Return queues over time of all requests of one run; without admission times, requests run from arrival."""
    arrived, last = columns["arrived_s"], columns["finished_s"]
    admitted = columns.get("admitted_s", arrived)
    stamps, group = np.unique(np.concatenate([arrived, admitted, last]), return_inverse=True)
    changes = ([1, -1, 0], [0, 1, -1])
    sums = (np.bincount(group, np.repeat(change, len(arrived)), len(stamps)) for change in changes)
    waiting, running = (np.cumsum(change).astype(np.int64) for change in sums)
    return Queues(stamps, waiting, running)

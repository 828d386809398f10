"""Records become numbers: totals over the seeds, and intervals over them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from spanlab.records import LOSS_CAUSES, Record
from spanlab.stats import Interval, paired_ratio_interval, t_interval
from spanlab.study.reuse_shares import reuse_shares

Columns = dict[str, NDArray[Any]]

POINTS = {"mean": None, "p50": 50.0, "p95": 95.0, "p99": 99.0}


def read_records(path: Path) -> Columns:
    """One arm's records as columns: every field of Record."""
    import pyarrow as pa
    from pyarrow import json

    kinds = {"int": pa.int64(), "float": pa.float64(), "float | None": pa.float64(), "bool": pa.bool_()}
    options = json.ParseOptions(pa.schema([(field.name, kinds[str(field.type)]) for field in fields(Record)]))
    table = json.read_json(path, json.ReadOptions(block_size=1 << 24), options)
    return {name: table.column(name).to_numpy() for name in table.column_names}


def read_runs(path: Path) -> list[dict[str, Any]]:
    """One arm's finished runs."""
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def select(columns: Columns, kept: NDArray[np.bool_]) -> Columns:
    """The rows that are kept."""
    return {name: values[kept] for name, values in columns.items()}


def at_rate(columns: Columns, rate_rps: float | None) -> NDArray[np.bool_]:
    """Which rows belong to one load; None is the workload's own times."""
    rates = columns["rate_rps"]
    kept: NDArray[np.bool_] = np.isnan(rates) if rate_rps is None else rates == rate_rps
    return kept


def delays(columns: Columns) -> dict[str, NDArray[np.float64]]:
    """Seconds per request: queue (admission − arrival), TTFT (first token − arrival), E2E (last token − arrival),
    TPOT ((last − first token) / (tokens − 1), NaN for one token)."""
    first, arrived = columns["first_token_s"], columns["arrived_s"]
    gaps = columns["output_tokens"] - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(gaps > 0, (columns["finished_s"] - first) / gaps, np.nan)
    return {
        "queue_s": columns["admitted_s"] - arrived,
        "ttft_s": first - arrived,
        "e2e_s": columns["finished_s"] - arrived,
        "tpot_s": tpot,
    }


def per_seed(values: NDArray[np.float64], seeds: NDArray[np.int64], percent: float | None) -> NDArray[np.float64]:
    """Mean or percentile of each seed's values, seeds in increasing order; NaN values are left out."""
    groups = [values[(seeds == seed) & ~np.isnan(values)] for seed in np.unique(seeds)]
    pick = np.mean if percent is None else lambda group: np.percentile(group, percent)
    return np.array([pick(group) if len(group) else np.nan for group in groups])


def spread(values: NDArray[np.float64], seeds: NDArray[np.int64]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Means over the seeds of each seed's mean and percentiles, with 95 % intervals; None where undefined."""
    points: dict[str, Any] = {}
    intervals: dict[str, Any] = {}
    for name, percent in POINTS.items():
        by_seed = per_seed(values, seeds, percent)
        known = not np.isnan(by_seed).any()
        interval = t_interval(by_seed) if known else None
        points[name] = interval.mean if interval else None
        intervals[name] = None if interval is None or interval.low is None else [interval.low, interval.high]
    return points, intervals


def summarise(family: str, columns: Columns, runs: list[dict[str, Any]], hit: str) -> dict[str, Any]:
    """One arm over its counted requests: totals over all seeds, bytes and delays as means over seeds."""
    hits = int((columns[f"{hit}_tokens"] > 0).sum())
    requests = len(columns["prompt_tokens"])
    tokens: dict[str, Any] = {
        name: int(columns[f"{name}_tokens"].sum())
        for name in ("prompt", "seen", "matched", "resumable", "reused", "computed", "repaired", "copied")
    }
    tokens["lost_by_cause"] = {cause: int(columns[f"lost_{cause}"].sum()) for cause in LOSS_CAUSES}
    out: dict[str, Any] = {
        "family": family,
        "requests": requests,
        "hits": hits,
        "tokens": tokens,
        **reuse_shares(columns),
        "token_hit_rate_interval": hit_rate_interval(columns),
        "request_hit_rate": hits / requests,
        "bytes": {name: _mean_over(runs, f"{name}_bytes") for name in _BYTES},
        "captured_states": int(columns["captured_states"].sum()),
        "evicted_bytes": sum(run["evicted_bytes"] for run in runs),
        "preemptions": int(columns["preemptions"].sum()),
        "recomputed_tokens": int(columns["recomputed_tokens"].sum()),
        "utilisation": utilisation(runs),
        "seeds": [run["seed"] for run in runs],
    }
    for name, values in delays(columns).items():
        out[name], out[f"{name}_interval"] = spread(values, columns["seed"])
    return out


def hit_rate_interval(columns: Columns) -> list[float] | None:
    """95 % interval over seeds of reused ÷ prompt tokens; None for a single seed."""
    seeds, index = np.unique(columns["seed"], return_inverse=True)
    reused, prompt = (np.bincount(index, columns[f"{name}_tokens"], len(seeds)) for name in ("reused", "prompt"))
    interval = t_interval(reused / prompt)
    return None if interval.low is None or interval.high is None else [interval.low, interval.high]


def utilisation(runs: list[dict[str, Any]]) -> float:
    """Busy share of the time from zero to the last token, mean over runs; 0 where no time passed."""
    return float(np.mean([run["busy_s"] / run["makespan_s"] if run["makespan_s"] else 0.0 for run in runs]))


_BYTES = ("kv_resident_mean", "state_resident_mean", "kv_resident_peak", "state_resident_peak")


def _mean_over(runs: list[dict[str, Any]], key: str) -> float:
    return float(np.mean([run[key] for run in runs]))


def copied_mean_bytes(columns: Columns, runs: list[dict[str, Any]], token_bytes: int) -> float:
    """Bytes of the private copies of spans that running requests hold, from admission to the last token: mean over
    time, then over runs. `columns` are all records of these runs, the warm-up's too."""
    held = columns["copied_tokens"] * (columns["finished_s"] - columns["admitted_s"]) * token_bytes
    means = [held[columns["seed"] == run["seed"]].sum() / run["makespan_s"] for run in runs if run["makespan_s"]]
    return float(np.mean(means)) if means else 0.0


def speedup(baseline_s: list[float], ttft_s: list[float]) -> dict[str, Any] | None:
    """Mean TTFT of the baseline over this arm's, paired by seed; None where this arm's is zero."""
    if min(ttft_s) <= 0:
        return None
    interval: Interval = paired_ratio_interval(baseline_s, ttft_s)
    return interval._asdict()


def bound_tokens(columns: Columns, hit_last: bool) -> int:
    """Tokens that an infinite cache would have saved: all that was seen before where this arm looks for it, as the
    prompt's beginning or as its spans anywhere, but for the last token's logits."""
    usable = columns["prompt_tokens"] - (0 if hit_last else 1)
    return int(np.minimum(columns["seen_tokens"], usable).sum())

"""Summary of records: totals over seeds, and intervals over seeds and groups."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from spanlab.analysis.bootstrap import Clusters, positive_ratio, share
from spanlab.records import LOSS_CAUSES, Record, ServedRecord
from spanlab.stats import Interval
from spanlab.steady import SATURATED, Stationarity
from spanlab.study.numbers.reuse_shares import reuse_shares

Columns = dict[str, NDArray[Any]]
_SERVED = {field.name for field in fields(ServedRecord)}

PERCENTILES = {"p50": 50.0, "p95": 95.0, "p99": 99.0}
#: Least number of requests above a tail percentile: p99 needs 1,000 requests, p95 needs 200.
BEYOND = 10
#: Delays that grow with the queue: in a saturated run they have no steady-state value.
GROWING = ("queue_s", "ttft_s", "e2e_s")


def read_records(source: Path | IO[bytes]) -> Columns:
    """Read one arm's records as columns: the fields of Record, or of ServedRecord for a real server.

    ValueError where a line is no record.
    """
    import pyarrow as pa
    from pyarrow import json

    kinds = {"int": pa.int64(), "float": pa.float64(), "float | None": pa.float64(), "bool": pa.bool_()}
    options = json.ParseOptions(pa.schema([(field.name, kinds[str(field.type)]) for field in fields(Record)]))
    table = json.read_json(source, json.ReadOptions(block_size=1 << 24), options)
    nulls = {name: table.column(name).null_count for name in table.column_names}
    served = table.num_rows > 0 and all(nulls[name] == table.num_rows for name in nulls.keys() - _SERVED)
    optional = {"rate_rps", "reused_tokens"} if served else {"rate_rps"}
    names = [name for name in table.column_names if not served or name in _SERVED]
    incomplete = [name for name in names if nulls[name] and name not in optional]
    if incomplete:
        raise ValueError(f"a record has no {incomplete[0]}")
    return {name: table.column(name).to_numpy() for name in names}


def select(columns: Columns, rows: NDArray[np.bool_] | NDArray[np.intp]) -> Columns:
    """Select rows of all columns by a mask or by indices."""
    return {name: values[rows] for name, values in columns.items()}


def at_rate(columns: Columns, rate_rps: float | None) -> NDArray[np.bool_]:
    """Mask of the rows of one load; None: arrival times of the workload."""
    rates = columns["rate_rps"]
    mask: NDArray[np.bool_] = np.isnan(rates) if rate_rps is None else rates == rate_rps
    return mask


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


def requests_needed(percent: float) -> int:
    """Least number of requests for a percentile: ten above it; one for the median and below."""
    return 1 if percent <= 50 else round(BEYOND / (1 - percent / 100))


def spread(values: NDArray[np.float64], clusters: Clusters) -> tuple[dict[str, Any], list[float] | None]:
    """Mean and percentiles over the requests of all seeds, and the 95 % interval of the mean.

    NaN values are ignored. A percentile with too few requests is None.
    """
    defined = ~np.isnan(values)
    samples = values[defined]
    if not samples.size:
        return dict.fromkeys(("mean", *PERCENTILES)), None
    sums = clusters.sums(np.where(defined, values, 0.0)), clusters.sums(defined.astype(np.int64))
    interval = positive_ratio(*sums)
    points: dict[str, Any] = {"mean": interval.mean}
    for name, percent in PERCENTILES.items():
        enough = samples.size >= requests_needed(percent)
        points[name] = float(np.percentile(samples, percent)) if enough else None
    return points, ends(interval)


def ends(interval: Interval) -> list[float] | None:
    """Both ends of an interval; None where an end is undefined."""
    return None if interval.low is None or interval.high is None else [interval.low, interval.high]


@dataclass(frozen=True)
class Load:
    """Load of one cell: its stationarity, offered work ÷ capacity, busy share of the time.

    `utilisation`  None without a timing model for the offered work
    """

    state: Stationarity
    utilisation: float | None
    busy_fraction: float


def summarise(
    family: str, columns: Columns, runs: list[dict[str, Any]], count_hit_as: str, load: Load
) -> dict[str, Any]:
    """Summarize one arm over the counted requests of all seeds; a saturated arm has no mean delays."""
    clusters = Clusters.of(columns["seed"], columns["group_id"])
    hits = int((columns[f"{count_hit_as}_tokens"] > 0).sum())
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
        "token_hit_rate_interval": hit_rate_interval(columns, clusters),
        "request_hit_rate": hits / requests,
        "bytes": {name: _mean_over(runs, f"{name}_bytes") for name in _BYTES},
        "captured_states": int(columns["captured_states"].sum()),
        "evicted_bytes": sum(run["evicted_bytes"] for run in runs),
        "preemptions": int(columns["preemptions"].sum()),
        "recomputed_tokens": int(columns["recomputed_tokens"].sum()),
        "utilisation": load.utilisation,
        "busy_fraction": load.busy_fraction,
        "stationarity": asdict(load.state),
        "seeds": [run["seed"] for run in runs],
        "groups": clusters.groups,
    }
    return out | _delays(columns, clusters, load.state.verdict == SATURATED)


def _delays(columns: Columns, clusters: Clusters, saturated: bool) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, values in delays(columns).items():
        hidden = saturated and name in GROWING
        samples = np.full(len(values), np.nan) if hidden else values
        out[name], interval = spread(samples, clusters)
        out[f"{name}_interval"] = {"mean": interval}
    return out


def hit_rate_interval(columns: Columns, clusters: Clusters) -> list[float] | None:
    """95 % interval of reused ÷ prompt tokens."""
    reused, prompt = (clusters.sums(columns[f"{name}_tokens"]) for name in ("reused", "prompt"))
    return ends(share(reused, prompt))


def busy_fraction(runs: list[dict[str, Any]]) -> float:
    """Busy share of the time from zero to the last token, mean over runs and replicas; 0 where no time passed."""
    shares = [run["busy_s"] / run["makespan_s"] / replicas_of(run) if run["makespan_s"] else 0.0 for run in runs]
    return float(np.mean(shares))


def replicas_of(run: dict[str, Any]) -> int:
    """Number of engines that served a run."""
    return len(run.get("replicas", ())) or 1


def utilisation(columns: Columns, runs: list[dict[str, Any]]) -> float | None:
    """Offered work ÷ capacity: seconds of fully batched steps that the requests need (`demand_s`
    of a run) ÷ seconds of all replicas in which they arrive, over all runs. n requests arrive in n / (n - 1) times
    the time from the first to the last. Above 1 the queue must grow, regardless of the busy share.

    None without a timing model, and where all requests arrive at once.
    """
    demands = [run.get("demand_s") for run in runs]
    offered = sum(replicas_of(run) * _offered_s(columns["arrived_s"][columns["seed"] == run["seed"]]) for run in runs)
    modelled = [demand for demand in demands if demand is not None]
    if len(modelled) < len(demands) or not offered:
        return None
    return float(sum(modelled) / offered)


def _offered_s(arrived: NDArray[np.float64]) -> float:
    return float(np.ptp(arrived) * len(arrived) / (len(arrived) - 1)) if len(arrived) > 1 else 0.0


_BYTES = ("kv_resident_mean", "state_resident_mean", "kv_resident_peak", "state_resident_peak")


def _mean_over(runs: list[dict[str, Any]], key: str) -> float:
    return float(np.mean([run[key] for run in runs]))


def copied_mean_bytes(columns: Columns, runs: list[dict[str, Any]], token_bytes: int) -> float:
    """Bytes of running requests' private copies of spans, from admission to the last token: mean over time, then over
    runs. `columns` are all records of these runs, including the warm-up."""
    byte_seconds = columns["copied_tokens"] * (columns["finished_s"] - columns["admitted_s"]) * token_bytes
    means = [
        byte_seconds[columns["seed"] == run["seed"]].sum() / run["makespan_s"] for run in runs if run["makespan_s"]
    ]
    return float(np.mean(means)) if means else 0.0


def ttft_sums(columns: Columns) -> NDArray[np.float64]:
    """Seconds of TTFT by seed and group, shape (seeds, groups)."""
    clusters = Clusters.of(columns["seed"], columns["group_id"])
    return clusters.sums(delays(columns)["ttft_s"])


def speedup(baseline: NDArray[np.float64], arm: NDArray[np.float64]) -> dict[str, Any] | None:
    """Mean TTFT of the baseline ÷ mean TTFT of an arm, of the same requests by seed and group.

    Both are resampled together, so that common variation cancels. This is a ratio of means, not a mean of ratios. None
    where the arm's mean is zero.
    """
    if arm.sum() <= 0:
        return None
    return positive_ratio(baseline, arm)._asdict()


def bound_tokens(columns: Columns, hit_last: bool) -> int:
    """Tokens that an infinite cache would have reused as prefixes: all tokens of prompts that arrived earlier, except
    the last token unless `hit_last`."""
    usable = columns["prompt_tokens"] - (0 if hit_last else 1)
    return int(np.minimum(columns["seen_tokens"], usable).sum())

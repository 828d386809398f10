"""Numbers of an arm: its files, sums over its records, and the summary of its runs."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from spanlab.records import LOSS_CAUSES, Record, ServedRecord, delays_of
from spanlab.report.data import LoadPoint
from spanlab.stats import (
    CLOSED,
    SATURATED,
    Clusters,
    Interval,
    Run,
    Stationarity,
    assess,
    positive_ratio,
    share,
)

# ------------------------------------------------------------------------------
# Token hit rates: over all tokens, as a mean over requests, and by halves of a run.
# ------------------------------------------------------------------------------

Columns = dict[str, NDArray[Any]]


def reuse_shares(columns: Columns) -> dict[str, float | list[float]]:
    """Token hit rates of an arm, in three definitions.

    `token_hit_rate`          ratio of sums: reused ÷ prompt tokens of all requests
    `token_hit_rate_mean`     mean of ratios: reused ÷ prompt tokens of each request, with equal
                              weights
    `token_hit_rate_halves`   ratio of sums in the first and the second half of each seed's
                              requests, by arrival: the first half includes the start on an empty
                              cache
    """
    prompt, reused = columns["prompt_tokens"], columns["reused_tokens"]
    # mask of the requests in the second half of their seed, by arrival, including the middle one
    late = np.zeros(len(prompt), dtype=np.bool_)
    for seed in np.unique(columns["seed"]):
        rows = np.flatnonzero(columns["seed"] == seed)
        in_order = rows[np.argsort(columns["arrived_s"][rows], kind="stable")]
        late[in_order[len(rows) // 2 :]] = True
    return {
        "token_hit_rate": _ratio(reused, prompt),
        "token_hit_rate_mean": float(np.mean(reused / prompt)),
        "token_hit_rate_halves": [_ratio(reused[half], prompt[half]) for half in (~late, late)],
    }


def _ratio(numerator: NDArray[Any], denominator: NDArray[Any]) -> float:
    total = int(denominator.sum())
    return int(numerator.sum()) / total if total else 0.0


# ------------------------------------------------------------------------------
# Summary of records: totals over seeds, and intervals over seeds and groups.
# ------------------------------------------------------------------------------

_SERVED = {field.name for field in fields(ServedRecord)}

PERCENTILES = {"p50": 50.0, "p95": 95.0, "p99": 99.0}
#: Least number of requests above a tail percentile: p99 needs 1,000 requests, p95 needs 200.
BEYOND = 10
#: Delays that grow with the queue: in a saturated run they have no steady-state value.
GROWING = ("queue_s", "ttft_s", "e2e_s")


def read_records(source: Path | IO[bytes]) -> Columns:
    """Read one arm's records as columns: the fields of Record, or of ServedRecord for a real
    server.

    ValueError where a line is no record.
    """
    import pyarrow as pa
    from pyarrow import json

    kinds = {
        "int": pa.int64(),
        "float": pa.float64(),
        "float | None": pa.float64(),
        "bool": pa.bool_(),
    }
    options = json.ParseOptions(
        pa.schema([(field.name, kinds[str(field.type)]) for field in fields(Record)])
    )
    table = json.read_json(source, json.ReadOptions(block_size=1 << 24), options)
    nulls = {name: table.column(name).null_count for name in table.column_names}
    served = table.num_rows > 0 and all(
        nulls[name] == table.num_rows for name in nulls.keys() - _SERVED
    )
    optional = {"rate_rps", "reused_tokens"} if served else {"rate_rps"}
    names = [name for name in table.column_names if not served or name in _SERVED]
    incomplete = [name for name in names if nulls[name] and name not in optional]
    if incomplete:
        raise ValueError(f"a record has no {incomplete[0]}")
    return {name: _values(table.column(name)) for name in names}


def _values(column: Any) -> NDArray[Any]:
    """Return a column of pyarrow: numbers with NaN where there is none, or objects."""
    import pyarrow as pa

    # Read from the buffers: column.to_numpy() imports pandas, and other functions pyarrow.compute.
    if not pa.types.is_primitive(column.type):
        objects: NDArray[Any] = column.to_numpy()
        return objects
    parts, boolean = [], pa.types.is_boolean(column.type)
    for chunk in column.chunks:
        valid, data = chunk.buffers()
        rows = slice(chunk.offset, chunk.offset + len(chunk))
        values: NDArray[Any] = (
            _bits(data) if boolean else np.frombuffer(data, chunk.type.to_pandas_dtype())
        )[rows]
        parts.append(
            values if not chunk.null_count else np.where(_bits(valid)[rows], values, np.nan)
        )
    return np.concatenate(parts) if parts else np.zeros(0)


def _bits(buffer: Any) -> NDArray[np.bool_]:
    """Return the bits of a buffer, from the lowest of each byte up."""
    return np.unpackbits(np.frombuffer(buffer, np.uint8), bitorder="little").astype(np.bool_)


def select(columns: Columns, rows: NDArray[np.bool_] | NDArray[np.intp]) -> Columns:
    """Select rows of all columns by a mask or by indices."""
    return {name: values[rows] for name, values in columns.items()}


def at_rate(columns: Columns, rate_rps: float | None) -> NDArray[np.bool_]:
    """Mask of the rows of one load; None: arrival times of the workload."""
    rates = columns["rate_rps"]
    mask: NDArray[np.bool_] = np.isnan(rates) if rate_rps is None else rates == rate_rps
    return mask


def requests_needed(percent: float) -> int:
    """Least number of requests for a percentile: ten above it; one for the median and below."""
    return 1 if percent <= 50 else round(BEYOND / (1 - percent / 100))


def spread(
    values: NDArray[np.float64], clusters: Clusters
) -> tuple[dict[str, Any], list[float] | None]:
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
    """Summarize one arm over the counted requests of all seeds; a saturated arm has no mean
    delays."""
    clusters = Clusters.of(columns["seed"], columns["group_id"])
    hits = int((columns[f"{count_hit_as}_tokens"] > 0).sum())
    requests = len(columns["prompt_tokens"])
    tokens: dict[str, Any] = {
        name: int(columns[f"{name}_tokens"].sum())
        for name in (
            "prompt",
            "seen",
            "matched",
            "resumable",
            "reused",
            "computed",
            "repaired",
            "copied",
        )
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
        "bytes": {name: float(np.mean([run[f"{name}_bytes"] for run in runs])) for name in _BYTES},
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
    for name, values in delays_of(columns).items():
        hidden = load.state.verdict == SATURATED and name in GROWING
        samples = np.full(len(values), np.nan) if hidden else values
        out[name], interval = spread(samples, clusters)
        out[f"{name}_interval"] = {"mean": interval}
    return out


def hit_rate_interval(columns: Columns, clusters: Clusters) -> list[float] | None:
    """95 % interval of reused ÷ prompt tokens."""
    reused, prompt = (clusters.sums(columns[f"{name}_tokens"]) for name in ("reused", "prompt"))
    return ends(share(reused, prompt))


def busy_fraction(runs: list[dict[str, Any]]) -> float:
    """Busy share of the time from zero to the last token, mean over runs and replicas; 0 where no
    time passed."""
    shares = [
        run["busy_s"] / run["makespan_s"] / replicas_of(run) if run["makespan_s"] else 0.0
        for run in runs
    ]
    return float(np.mean(shares))


def replicas_of(run: dict[str, Any]) -> int:
    """Number of engines that served a run."""
    return len(run.get("replicas", ())) or 1


def utilisation_of(columns: Columns, runs: list[dict[str, Any]]) -> float | None:
    """Offered work ÷ capacity: seconds of fully batched steps that the requests need (`demand_s` of
    a run) ÷ seconds of all replicas in which they arrive, over all runs. n requests arrive in n /
    (n - 1) times the time from the first to the last. Above 1 the queue must grow, regardless of
    the busy share.

    None without a timing model, and where all requests arrive at once.
    """
    demands = [run.get("demand_s") for run in runs]
    offered = 0.0
    for run in runs:
        arrived = columns["arrived_s"][columns["seed"] == run["seed"]]
        if len(arrived) > 1:
            offered += replicas_of(run) * float(np.ptp(arrived) * len(arrived) / (len(arrived) - 1))
    modelled = [demand for demand in demands if demand is not None]
    if len(modelled) < len(demands) or not offered:
        return None
    return float(sum(modelled) / offered)


_BYTES = ("kv_resident_mean", "state_resident_mean", "kv_resident_peak", "state_resident_peak")


def copied_mean_bytes(columns: Columns, runs: list[dict[str, Any]], token_bytes: int) -> float:
    """Bytes of running requests' private copies of spans, from admission to the last token: mean
    over time, then over runs. `columns` are all records of these runs, including the warm-up."""
    byte_seconds = (
        columns["copied_tokens"] * (columns["finished_s"] - columns["admitted_s"]) * token_bytes
    )
    means = [
        byte_seconds[columns["seed"] == run["seed"]].sum() / run["makespan_s"]
        for run in runs
        if run["makespan_s"]
    ]
    return float(np.mean(means)) if means else 0.0


def ttft_sums(columns: Columns) -> NDArray[np.float64]:
    """Seconds of TTFT by seed and group, shape (seeds, groups)."""
    clusters = Clusters.of(columns["seed"], columns["group_id"])
    return clusters.sums(delays_of(columns)["ttft_s"])


def speedup(baseline: NDArray[np.float64], arm: NDArray[np.float64]) -> dict[str, Any] | None:
    """Mean TTFT of the baseline ÷ mean TTFT of an arm, of the same requests by seed and group.

    Both are resampled together, so that common variation cancels. This is a ratio of means, not a
    mean of ratios. None where the arm's mean is zero.
    """
    if arm.sum() <= 0:
        return None
    return positive_ratio(baseline, arm)._asdict()


def bound_tokens(columns: Columns, hit_last: bool) -> int:
    """Tokens that an infinite cache would have reused as prefixes: all tokens of prompts that
    arrived earlier, except the last token unless `hit_last`."""
    usable = columns["prompt_tokens"] - (0 if hit_last else 1)
    return int(np.minimum(columns["seen_tokens"], usable).sum())


# ------------------------------------------------------------------------------
# Load of one cell (an arm at a load): stationarity, utilisation and delays.
# ------------------------------------------------------------------------------

#: Least number of seeds for a band: with fewer, the interval of Student's t is too wide to be
#: useful.
BAND_SEEDS = 5

Runs = list[dict[str, Any]]


def load_of(columns: Columns, runs: Runs, clients: int | None = None) -> Load:
    """Stationarity and utilisation of one cell; `columns` are all its requests, including the
    warm-up.

    `clients`  number of clients of a closed loop, which has no offered load; None: open loop
    """
    if clients is not None:
        return Load(Stationarity(CLOSED, None, None, None), None, busy_fraction(runs))
    utilisation = utilisation_of(columns, runs)
    first = columns["first_token_s"]
    seed_masks = [columns["seed"] == seed for seed in np.unique(columns["seed"])]
    state = assess(
        [Run(columns["arrived_s"][seed_mask], first[seed_mask]) for seed_mask in seed_masks],
        utilisation,
    )
    return Load(state, utilisation, busy_fraction(runs))


def load_point(name: str, family: str, columns: Columns, runs: Runs) -> LoadPoint:
    """Summary of one arm at one load; `columns` are all requests of that load, including the
    warm-up."""
    load = load_of(columns, runs)
    counted = select(columns, columns["counted"].astype(bool))
    clusters = Clusters.of(counted["seed"], counted["group_id"])
    delays = delays_of(counted)
    saturated = load.state.verdict == SATURATED
    queue, ttft = (_band(delays[key], clusters, saturated) for key in ("queue_s", "ttft_s"))
    return LoadPoint(
        arm=name,
        family=family,
        rate_rps=runs[0]["rate_rps"],
        seeds=clusters.seeds,
        requests=len(counted["seed"]),
        state=load.state,
        utilisation=load.utilisation,
        busy_fraction=load.busy_fraction,
        queue_s=queue,
        ttft_s=ttft,
    )


def _band(values: Any, clusters: Clusters, saturated: bool) -> dict[str, float | None]:
    """Mean, its interval and p99; a saturated cell has only its mean, in `unstable`, for
    figures."""
    points, interval = spread(values, clusters)
    low, high = interval if interval and clusters.seeds >= BAND_SEEDS else (None, None)
    if saturated:
        return {"mean": None, "low": None, "high": None, "p99": None, "unstable": points["mean"]}
    return {
        "mean": points["mean"],
        "low": low,
        "high": high,
        "p99": points["p99"],
        "unstable": None,
    }


# ------------------------------------------------------------------------------
# Files of one arm: the records of its cells in order, and one line for each finished cell.
#
# The format is JSON lines, not Parquet: a line is complete as soon as it is written, so a
# killed run keeps every finished cell. A line in the runs file has the number of records of its
# cell and the byte offset of their end. Bytes after the last end are truncated.
# ------------------------------------------------------------------------------

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RunCell:
    """One run: a seed, a load, and the number of the repeat with the same arrivals.

    `rate_rps`  None: the workload has arrival times
    """

    seed: int
    rate_rps: float | None
    repeat: int = 0

    @staticmethod
    def of(row: dict[str, Any]) -> RunCell:
        """The cell of a line in the runs file; `repeat` is absent in the first run."""
        return RunCell(row["seed"], row["rate_rps"], row.get("repeat", 0))

    @property
    def first_repeat(self) -> RunCell:
        """Cell of the first run with the same arrivals."""
        return RunCell(self.seed, self.rate_rps)

    @property
    def name(self) -> str:
        """Text of the cell for file names."""
        return f"seed{self.seed}-rate{self.rate_rps}" + (
            f"-repeat{self.repeat}" if self.repeat else ""
        )


@dataclass(frozen=True, slots=True)
class ArmFiles:
    """Paths of one arm's records and finished runs, and the folder of its step logs.

    `readings`  machine readings of the study; None where its runs record none
    `arm_logs`  folder of the step logs of the study's arms, where these files are of a repeat;
                None: of an arm
    """

    records: Path
    runs: Path
    steps: Path
    readings: Path | None
    arm_logs: Path | None = None

    @staticmethod
    def of_arm(folder: Path, arm: str, readings: Path | None = None) -> ArmFiles:
        """Files of one of several arms in a folder."""
        records, runs = (folder / kind / f"{arm}.jsonl" for kind in ("records", "runs"))
        return ArmFiles(records, runs, folder / "steps", readings)

    @staticmethod
    def alone(folder: Path, readings: Path, arm_logs: Path | None = None) -> ArmFiles:
        """Files of the only arm in a folder."""
        return ArmFiles(
            folder / "records.jsonl", folder / "runs.jsonl", folder / "steps", readings, arm_logs
        )

    def log(self, arm: str, cell: RunCell) -> Path:
        """Step log of one run."""
        return self.steps / f"{arm}-{cell.name}.jsonl"

    def outputs(self, arm: str, cell: RunCell) -> Path:
        """Generated tokens of one run."""
        return self.log(arm, cell).with_suffix(".npz")

    def logits(self, arm: str, cell: RunCell) -> Path:
        """Logits that scores of a run are relative to; where this is a repeat, those of the arm's
        run."""
        return (self.arm_logs or self.steps) / f"{arm}-{cell.name}.logits.npy"

    def serving(self, arm: str, cell: RunCell) -> Path:
        """Token gaps and batch sizes of one run."""
        return self.log(arm, cell).with_suffix(".serving.npz")

    def trace(self, arm: str, cell: RunCell) -> Path:
        """Trace file of one run."""
        return self.steps.parent / "traces" / f"{arm}-{cell.name}.json"

    def finished(self) -> Rows:
        """The lines of the finished cells, without a partial line of a killed process."""
        lines = self.runs.read_bytes().split(b"\n")[:-1] if self.runs.exists() else []
        return [orjson.loads(line) for line in lines]

    def columns(self) -> dict[RunCell, Columns]:
        """Records of each finished cell."""
        rows = self.finished()
        if not rows:
            return {}
        columns = read_records(io.BytesIO(self.records.read_bytes()[: rows[-1]["records_end"]]))
        ends = np.cumsum([row["requests"] for row in rows]).tolist()
        begins = [0, *ends[:-1]]
        return {
            RunCell.of(row): {name: values[begin:end] for name, values in columns.items()}
            for row, begin, end in zip(rows, begins, ends, strict=True)
        }

    def corruption(self) -> str:
        """Describe an inconsistency, with the file's path; empty where the files agree."""
        path = self.runs
        try:
            rows = self.finished()
            end = rows[-1]["records_end"] if rows else 0
            path = self.records
            error_text = (
                _find_inconsistency(rows, read_records(io.BytesIO(path.read_bytes()[:end])))
                if rows
                else ""
            )
        except (ValueError, KeyError, TypeError, OSError) as error:
            error_text = " ".join(str(error).split())
        return error_text and f"{path}: {error_text}"

    def remove(self) -> None:
        """Delete the records and runs of every cell."""
        self.runs.unlink(missing_ok=True)
        self.records.unlink(missing_ok=True)

    def sort_cells(self, order: Sequence[RunCell]) -> None:
        """Sort the cells in the files by `order`, cells that are not in it last, as in an
        uninterrupted run."""
        rows, position = self.finished(), {cell: index for index, cell in enumerate(order)}
        ordered = sorted(rows, key=lambda row: position.get(RunCell.of(row), len(position)))
        if ordered != rows:
            data, begin, parts = self.records.read_bytes(), 0, {}
            for row in rows:
                parts[RunCell.of(row)], begin = data[begin : row["records_end"]], row["records_end"]
            ends = np.cumsum([len(parts[RunCell.of(row)]) for row in ordered]).tolist()
            lines = [
                orjson.dumps(row | {"records_end": end}) + b"\n"
                for row, end in zip(ordered, ends, strict=True)
            ]
            replace_file(self.records, b"".join(parts[RunCell.of(row)] for row in ordered))
            replace_file(self.runs, b"".join(lines))


def _find_inconsistency(rows: Rows, columns: Columns) -> str:
    """Describe the first difference between records and lines of finished cells; empty where they
    agree."""
    counts = [row["requests"] for row in rows]
    if sum(counts) != len(columns["seed"]):
        return f"{len(columns['seed'])} records, expected {sum(counts)}"
    rates = np.array(
        [np.nan if row["rate_rps"] is None else row["rate_rps"] for row in rows], np.float64
    )
    expected = {"seed": np.array([row["seed"] for row in rows]), "rate_rps": rates}
    for name, values in expected.items():
        if not np.array_equal(
            np.repeat(values, counts), columns[name], equal_nan=name == "rate_rps"
        ):
            return f"{name} of some records differs from their cell"
    ids = np.split(columns["request_id"], np.cumsum(counts)[:-1])
    return (
        ""
        if all(len(np.unique(request_ids)) == len(request_ids) for request_ids in ids)
        else "a request has two records"
    )


def replace_file(path: Path, data: bytes) -> None:
    """Write a temporary file and rename it, so that a full disk leaves no partial file."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# ------------------------------------------------------------------------------
# Readers of one engine run's outputs: tokens by request, and logits or scores where they were
# recorded.
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outputs:
    """`tokens` by request; `logits` by request, float32, shape (recorded tokens, vocabulary), in
    order of tokens."""

    tokens: dict[int, NDArray[np.int32]]
    logits: dict[int, NDArray[np.float32]]


def read_outputs(path: Path) -> Outputs:
    """Return the outputs in the file `path` of a run."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    pieces = np.split(arrays["tokens"], arrays["ends"][1:-1]) if len(arrays["requests"]) else []
    tokens = dict(zip(arrays["requests"].tolist(), pieces, strict=True))
    requests, order = arrays["keys"][:, 0], np.lexsort(arrays["keys"].T[::-1])
    logits = {
        request: arrays["logits"][order[requests[order] == request]]
        for request in np.unique(requests).tolist()
    }
    return Outputs(tokens, logits)


def read_options(path: Path) -> dict[int, list[float]]:
    """Return losses per token of the wrong options by request, from a run that recorded scores."""
    with np.load(path, allow_pickle=False) as file:
        requests, losses = file["options"][:, 0], file["option_nll"]
    return {
        request: losses[requests == request].tolist() for request in np.unique(requests).tolist()
    }


def read_scores(path: Path) -> dict[int, dict[str, float]]:
    """Return means over the tokens of each gold answer by request and score, from a run that
    recorded scores."""
    with np.load(path, allow_pickle=False) as file:
        requests = file["scored"][:, 0]
        scores = {name: file[name] for name in ("nll", "kl", "top1")}
    means: dict[int, dict[str, float]] = {}
    for request in np.unique(requests).tolist():
        means[request] = {
            name: float(values[requests == request].mean()) for name, values in scores.items()
        }
    return means

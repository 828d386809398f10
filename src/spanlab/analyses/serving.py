"""Metrics of serving by the names and definitions of vLLM's benchmark (`vllm/benchmarks/serve.py`).

TTFT is first token − arrival, E2E last token − arrival, TPOT (last − first token) ÷ (tokens − 1) of
requests with two tokens or more, ITL every gap between successive tokens. Standard deviations are
those of a population, percentiles are linear, and rates are per second from the first arrival to
the last token. Arrivals are the intended ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spanlab.analyses.base import Findings, Finished, footer
from spanlab.records import delays_of
from spanlab.report import style
from spanlab.report.table import (
    MISSING,
    Cell,
    Ends,
    Field,
    Table,
    estimate,
    hidden,
    percent_text,
    ratio_text,
    seconds_text,
    tabulate,
    with_ends,
    word,
)
from spanlab.settings.analyses import ANALYSES, TOKENS, Analysis, ServingSettings
from spanlab.settings.study import Study
from spanlab.stats import Interval, t_interval
from spanlab.study.bounds import family
from spanlab.study.jobs import run_cells
from spanlab.study.numbers import ArmFiles, RunCell, busy_fraction, select

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Floats = NDArray[np.float64]
ColumnMap = Mapping[str, NDArray[Any]]
Values = dict[str, float]

PERCENTILES = (90, 95, 99)
_MS = 1e3
_MS_PER_NS = 1e-6


@dataclass(frozen=True)
class Gaps:
    """Gaps between tokens, nanoseconds in ascending order, and the number of occurrences; both of
    shape (n,)."""

    gap_ns: NDArray[np.int64]
    count: NDArray[np.int64]


@dataclass(frozen=True)
class Goal:
    """Limits of one request in seconds; infinity means no limit."""

    ttft_s: float
    tpot_s: float
    e2e_s: float


def serving_values(columns: ColumnMap, gaps: Gaps | None, goals: Mapping[str, Goal]) -> Values:
    """Return every metric of the counted requests of one run by name; metrics without data are
    absent.

    `columns` are fields of records, at least those that a client observes.
    """
    delays = delays_of(columns)
    several = ~np.isnan(delays["tpot_s"])
    duration_s = float(columns["finished_s"].max() - columns["arrived_s"].min())
    prompt, output = (int(columns[f"{name}_tokens"].sum()) for name in ("prompt", "output"))
    values: Values = {
        "completed": len(columns["prompt_tokens"]),
        "duration": duration_s,
        "total_input_tokens": prompt,
        "total_output_tokens": output,
    }
    if duration_s > 0:
        values |= {
            "request_throughput": values["completed"] / duration_s,
            "output_throughput": output / duration_s,
            "total_token_throughput": (prompt + output) / duration_s,
        }
    values |= spread("ttft", delays["ttft_s"] * _MS) | spread(
        "tpot", delays["tpot_s"][several] * _MS
    )
    values |= spread("e2el", delays["e2e_s"] * _MS)
    # the same statistics as `spread` of the single gaps
    if gaps is not None and (total := int(gaps.count.sum())):
        gaps_ms: Floats = gaps.gap_ns.astype(np.float64) * _MS_PER_NS
        weights = gaps.count / total
        mean = float(gaps_ms @ weights)
        values |= {
            "mean_itl_ms": mean,
            "median_itl_ms": pooled_percentile(gaps_ms, gaps.count, 50),
            "std_itl_ms": float(np.sqrt((gaps_ms - mean) ** 2 @ weights)),
        }
        for percent in PERCENTILES:
            values[f"p{percent}_itl_ms"] = pooled_percentile(gaps_ms, gaps.count, percent)
    if "queue_s" in delays:
        values |= spread("queue", delays["queue_s"] * _MS)
    for name, goal in goals.items():
        good = (
            (delays["ttft_s"] <= goal.ttft_s)
            & ~(delays["tpot_s"] > goal.tpot_s)  # one token has no TPOT to exceed
            & (delays["e2e_s"] <= goal.e2e_s)
        )
        values[f"slo_attainment:{name}"] = float(good.mean())
        if duration_s > 0:
            values[f"request_goodput:{name}"] = int(good.sum()) / duration_s
    reused = columns["reused_tokens"]
    if not np.isnan(reused).any():  # else the server does not report reuse
        values["token_hit_rate"] = float(reused.sum() / columns["prompt_tokens"].sum())
    return values


def spread(name: str, values_ms: Floats) -> Values:
    """Return mean, median, standard deviation and percentiles with vLLM's names; empty for no
    values."""
    if not len(values_ms):
        return {}
    statistics = {
        f"mean_{name}_ms": float(values_ms.mean()),
        f"median_{name}_ms": float(np.median(values_ms)),
        f"std_{name}_ms": float(values_ms.std()),
    }
    tails = np.percentile(values_ms, PERCENTILES).tolist()
    return statistics | {
        f"p{percent}_{name}_ms": tail for percent, tail in zip(PERCENTILES, tails, strict=True)
    }


def pooled_percentile(values: Floats, counts: NDArray[np.int64], percent: float) -> float:
    """Return the linear percentile of ascending values that occur `counts` times each."""
    ends = np.cumsum(counts)
    position = (int(ends[-1]) - 1) * percent / 100
    below, above = values[
        np.searchsorted(ends, [np.floor(position), np.ceil(position)], side="right")
    ].tolist()
    return float(below + (above - below) * (position - np.floor(position)))


@dataclass(frozen=True)
class Queues:
    """Numbers of requests that wait for first admission and that run, after every change; arrays of
    shape (n,).

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


def queues(columns: ColumnMap) -> Queues:
    """Return queues over time of all requests of one run; without admission times, requests run
    from arrival."""
    arrived, last = columns["arrived_s"], columns["finished_s"]
    admitted = columns.get("admitted_s", arrived)
    stamps, group = np.unique(np.concatenate([arrived, admitted, last]), return_inverse=True)
    changes = ([1, -1, 0], [0, 1, -1])
    sums = (np.bincount(group, np.repeat(change, len(arrived)), len(stamps)) for change in changes)
    waiting, running = (np.cumsum(change).astype(np.int64) for change in sums)
    return Queues(stamps, waiting, running)


# ------------------------------------------------------------------------------
# The table of the analysis `serving`: one row per arm and load.
# ------------------------------------------------------------------------------

_NOTES = (
    "names and definitions of vLLM's benchmark: TTFT = first token − arrival, TPOT = (last − first token) ÷ "
    "(tokens − 1), ITL = gap between successive tokens, E2E = last token − arrival; arrivals are intended times",
    "rates count from the first arrival to the last token; goodput = requests per second that keep every limit",
    "batch = sequences of a step, mean over busy time; waiting, running = mean over time, preempted requests run",
)


@dataclass(frozen=True)
class ServingRow:
    """One arm at one load; `values` are intervals over seeds by the name of the metric."""

    arm: str
    rate_rps: float | None
    seeds: int
    values: Mapping[str, Interval]

    def summary(self) -> dict[str, Any]:
        """The row for `summary.json`."""
        metrics = {name: value._asdict() for name, value in self.values.items()}
        return {"arm": self.arm, "rate_rps": self.rate_rps, "seeds": self.seeds, "metrics": metrics}


def _milliseconds(value: float, ends: Ends | None) -> str:
    return seconds_text(value / 1e3, None if ends is None else (ends[0] / 1e3, ends[1] / 1e3))


def _number(value: float, ends: Ends | None) -> str:
    return ratio_text(value, ends).removesuffix(" ×")


def _metric(name: str, heading: str, keep: int, show: Callable[[float, Ends | None], str]) -> Field:
    return Field(name, heading, estimate(show), lambda row: row.values.get(name), keep)


#: Arguments of `_metric` for visible metrics; others are in CSV only.
_SHOWN = (
    ("failed", "failed\nrequests", 0, _number),
    ("request_throughput", "requests\nper s", 3, _number),
    ("output_throughput", "output\ntokens/s", 4, _number),
    ("mean_ttft_ms", "TTFT\nmean", 0, _milliseconds),
    ("p99_ttft_ms", "TTFT\np99", 2, _milliseconds),
    ("mean_tpot_ms", "TPOT\nmean", 0, _milliseconds),
    ("p99_tpot_ms", "TPOT\np99", 5, _milliseconds),
    ("mean_itl_ms", "ITL\nmean", 6, _milliseconds),
    ("p99_itl_ms", "ITL\np99", 2, _milliseconds),
    ("mean_e2el_ms", "E2E\nmean", 1, _milliseconds),
    ("p99_e2el_ms", "E2E\np99", 5, _milliseconds),
    ("mean_queue_ms", "queue\nmean", 4, _milliseconds),
    ("token_hit_rate", "token\nhit rate", 3, percent_text),
    ("batch_size", "batch\nmean", 6, _number),
    ("mean_waiting", "waiting\nmean", 6, _number),
    ("mean_running", "running\nmean", 7, _number),
    ("busy_fraction", "busy", 7, percent_text),
    ("preemptions", "preemp-\ntions", 7, _number),
)


def serving_table(
    title: str, rows: Sequence[ServingRow], goals: Sequence[str], caveats: Sequence[str]
) -> Table:
    """Return a table of every metric; columns without any value are omitted, and some are in CSV
    only."""
    goodput = [_metric(f"request_goodput:{name}", f"goodput\n{name}", 1, _number) for name in goals]
    metrics = {metric.name: metric for metric in (*goodput, *starmap(_metric, _SHOWN))}
    names = dict.fromkeys(name for row in rows for name in row.values)
    metrics |= {name: _metric(name, "", 0, _number) for name in names if name not in metrics}
    loads = len({row.rate_rps for row in rows}) > 1
    fields = (
        Field("arm", "arm", word, left=True),
        Field(
            "rate_rps",
            "rate" if loads else "",
            lambda rate_rps: MISSING if rate_rps is None else Cell(rate_rps, f"{rate_rps:g}/s"),
        ),
        Field("seeds", "", hidden),
        *(
            field
            for name, metric in metrics.items()
            if name in names
            for field in with_ends(metric)
        ),
    )
    several = any(row.seeds > 1 for row in rows)
    failed = ["a failed request counts in no other column"] if "failed" in names else []
    notes = (
        *_NOTES,
        *failed,
        *(["[a, b] = 95 % t interval over seeds"] if several else []),
        *caveats,
    )
    return tabulate("serving", title, fields, rows, notes)


# ------------------------------------------------------------------------------
# Waiting and running requests over time.
# ------------------------------------------------------------------------------


def draw_queues_over_time(
    queues: Mapping[str, Queues], families: Mapping[str, str], footer: str
) -> Figure:
    """Draw one line per arm, of its first run: waiting requests above, running requests below."""
    figure, [[above], [below]] = style.framed_with(
        footer,
        "Requests that wait and that run",
        rows=2,
        margins=style.margins_for(queues),
        share=("col", "none"),
    )
    unit = style.time_unit(max(float(arm_queues.time_s[-1]) for arm_queues in queues.values()))
    for name, stroke in style.strokes(families.items()).items():
        arm_queues = queues[name]
        for ax, counts in ((above, arm_queues.waiting), (below, arm_queues.running)):
            options = {"color": stroke.colour, "linestyle": stroke.line, "linewidth": 1.0}
            ax.plot(
                arm_queues.time_s * unit.factor,
                counts,
                drawstyle="steps-post",
                label=name,
                **options,
            )
    style.label(above, "", "waiting")
    style.label(below, f"time ({unit.name})", "running")
    for ax in (above, below):
        ax.set_ylim(bottom=0)
    style.legend_right(above)
    return figure


# ------------------------------------------------------------------------------
# The analysis `serving`: delays, rates, goodput and queues of every arm, by the names of vLLM's
# benchmark.
# ------------------------------------------------------------------------------

_OF_RUN = ("preemptions", "kv_resident_mean_bytes")


@dataclass(frozen=True)
class _Arm:
    """Results of an arm at one load: metrics over its runs, and the queues of the first run."""

    row: ServingRow
    queues: Queues
    notes: tuple[str, ...]


def serving(finished: Finished) -> Findings:
    """Return metrics of every arm at every load; intervals are over seeds."""
    study = finished.study
    goals = {}
    for name, limits in study.analyses.serving.goodput.items():
        goals[name] = Goal(
            **{key: math.inf if limit is None else limit for key, limit in vars(limits).items()}
        )
    arms = [
        arm for name, files in finished.files.items() for arm in _loads(study, name, files, goals)
    ]
    rows = [arm.row for arm in arms]
    title = f"{finished.name} · serving\n{footer(finished)}"
    caveats = tuple(dict.fromkeys(note for arm in arms for note in arm.notes))
    # runs on a real server may start with the cache of earlier runs
    runs = sum(len(run_cells(study, arm)) for arm in study.chosen())
    if study.server.base_url is not None and runs > 1 and study.server.reset_path is None:
        warm = "the server's cache stayed warm from run to run"
        caveats = (f"{warm}; server.reset_path=PATH empties it before each", *caveats)
    queues_by_arm = {
        arm.row.arm: arm.queues for arm in arms if arm.row.rate_rps == study.arrivals.rate_rps
    }
    families = {name: family(study.arms[name]) for name in queues_by_arm}
    return Findings(
        summary={"serving": [row.summary() for row in rows]},
        tables=(serving_table(title, rows, tuple(goals), caveats),),
        figures={
            "queues_over_time": partial(
                draw_queues_over_time, queues_by_arm, families, footer(finished)
            )
        },
        caveats=caveats,
    )


def _loads(study: Study, arm: str, files: ArmFiles, goals: Mapping[str, Goal]) -> list[_Arm]:
    """Return one arm at each of its rates, with all repeats and seeds of a rate together."""
    all_cells, columns = run_cells(study, arm), files.columns()
    rows = {RunCell.of(row): row for row in files.finished()}
    arms = []
    for rate in dict.fromkeys(cell.rate_rps for cell in all_cells):
        rate_cells = [cell for cell in all_cells if cell.rate_rps == rate]
        runs, notes = [], []
        for cell in rate_cells:
            run, tokens = rows[cell], _tokens(files, arm, cell)
            counted = select(columns[cell], columns[cell]["counted"].astype(bool))
            gaps = Gaps(tokens["gap_ns"], tokens["gap_count"]) if tokens else None
            values = serving_values(counted, gaps, goals) | queues(columns[cell]).values()
            for given, names in ((tokens, ("batch_size", "batch_tokens")), (run, _OF_RUN)):
                values |= {name: float(given[name]) for name in names if name in given}
            if "failures" in run:
                values["failed"] = len(run["failures"])
            if "busy_s" in run:
                values["busy_fraction"] = busy_fraction([run])
            runs.append(values)
            notes += _notes(arm, run, tokens)
        # Metrics that all runs have. Student's interval is not cut: a lower end below zero shows
        # that the runs hardly determine the metric.
        shared = [name for name in runs[0] if all(name in run for run in runs)]
        over_runs = {name: t_interval([run[name] for run in runs]) for name in shared}
        row = ServingRow(arm, rate, len({cell.seed for cell in rate_cells}), over_runs)
        arms.append(_Arm(row, queues(columns[rate_cells[0]]), tuple(notes)))
    return arms


def _tokens(files: ArmFiles, arm: str, cell: RunCell) -> dict[str, Any]:
    """Return the serving log of a run; empty where an earlier run of the study did not record
    one."""
    path = files.serving(arm, cell)
    if not path.exists():
        return {}
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def _notes(arm: str, run: dict[str, Any], tokens: dict[str, Any]) -> list[str]:
    """Return the caveats of one run."""
    notes = (
        []
        if tokens
        else [
            f"arms.{arm}: gaps between tokens were not written; output.if_exists=replace runs it again"
        ]
    )
    if "failures" not in run:
        return notes
    notes.append(
        f"requests were sent {run['late_mean_s'] * 1e3:.3g} ms after their times on average, at most "
        f"{run['late_max_s'] * 1e3:.3g} ms: delays count from the times"
    )
    if failures := run["failures"]:
        number, first = next(iter(failures.items()))
        sent = run["requests"] + len(failures)
        notes.append(
            f"{len(failures):,} of {sent:,} requests failed and count nowhere, request {number} for this: {first}"
        )
    if run["other_lengths"]:
        notes.append(f"{run['other_lengths']:,} answers have another length than the workload's")
    return notes


ANALYSES.add(Analysis("serving", serving, needs=(TOKENS,), options=ServingSettings))

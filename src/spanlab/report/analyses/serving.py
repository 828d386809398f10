"""The table of the analysis `serving`: one row per arm and load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spanlab.report import cells, units
from spanlab.report.fields import Field, tabulate, with_ends
from spanlab.report.tables import MISSING, Cell, Table
from spanlab.stats import Interval

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


def _milliseconds(value: float, ends: units.Ends | None) -> str:
    return units.seconds(value / 1e3, None if ends is None else (ends[0] / 1e3, ends[1] / 1e3))


def _number(value: float, ends: units.Ends | None) -> str:
    return units.ratio(value, ends).removesuffix(" ×")


def _metric(name: str, heading: str, keep: int, show: Callable[[float, units.Ends | None], str]) -> Field:
    return Field(name, heading, cells.estimate(show), lambda row: row.values.get(name), keep)


#: Visible metrics; others are in CSV only.
_SHOWN = (
    _metric("failed", "failed\nrequests", 0, _number),
    _metric("request_throughput", "requests\nper s", 3, _number),
    _metric("output_throughput", "output\ntokens/s", 4, _number),
    _metric("mean_ttft_ms", "TTFT\nmean", 0, _milliseconds),
    _metric("p99_ttft_ms", "TTFT\np99", 2, _milliseconds),
    _metric("mean_tpot_ms", "TPOT\nmean", 0, _milliseconds),
    _metric("p99_tpot_ms", "TPOT\np99", 5, _milliseconds),
    _metric("mean_itl_ms", "ITL\nmean", 6, _milliseconds),
    _metric("p99_itl_ms", "ITL\np99", 2, _milliseconds),
    _metric("mean_e2el_ms", "E2E\nmean", 1, _milliseconds),
    _metric("p99_e2el_ms", "E2E\np99", 5, _milliseconds),
    _metric("mean_queue_ms", "queue\nmean", 4, _milliseconds),
    _metric("token_hit_rate", "token\nhit rate", 3, units.percent),
    _metric("batch_size", "batch\nmean", 6, _number),
    _metric("mean_waiting", "waiting\nmean", 6, _number),
    _metric("mean_running", "running\nmean", 7, _number),
    _metric("busy_fraction", "busy", 7, units.percent),
    _metric("preemptions", "preemp-\ntions", 7, _number),
)


def serving_table(title: str, rows: Sequence[ServingRow], goals: Sequence[str], caveats: Sequence[str]) -> Table:
    """Return a table of every metric; columns without any value are omitted, and some are in CSV only."""
    goodput = [_metric(f"request_goodput:{name}", f"goodput\n{name}", 1, _number) for name in goals]
    metrics = {metric.name: metric for metric in (*goodput, *_SHOWN)}
    names = dict.fromkeys(name for row in rows for name in row.values)
    metrics |= {name: _metric(name, "", 0, _number) for name in names if name not in metrics}
    loads = len({row.rate_rps for row in rows}) > 1
    fields = (
        Field("arm", "arm", cells.word, left=True),
        Field("rate_rps", "rate" if loads else "", _rate),
        Field("seeds", "", cells.hidden),
        *(field for name, metric in metrics.items() if name in names for field in with_ends(metric)),
    )
    several = any(row.seeds > 1 for row in rows)
    failed = ["a failed request counts in no other column"] if "failed" in names else []
    notes = (*_NOTES, *failed, *(["[a, b] = 95 % t interval over seeds"] if several else []), *caveats)
    return tabulate("serving", title, fields, rows, notes)


def _rate(rate_rps: float | None) -> Cell:
    return MISSING if rate_rps is None else Cell(rate_rps, f"{rate_rps:g}/s")

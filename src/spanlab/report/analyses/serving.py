"""The table of the analysis `serving`: one row per arm and load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spanlab.report import cells, units
from spanlab.report.tables import MISSING, Cell, Column, Table
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


Show = Callable[[float, units.Ends | None], str]


def _milliseconds(value: float, ends: units.Ends | None) -> str:
    return units.seconds(value / 1e3, None if ends is None else (ends[0] / 1e3, ends[1] / 1e3))


def _number(value: float, ends: units.Ends | None) -> str:
    text = units.ratio(value, ends)
    return text.removesuffix(" ×")


def _percent(value: float, ends: units.Ends | None) -> str:
    return cells.percent_between(value, ends).text


#: Visible columns: name of the metric, heading, order of dropping, format. Other metrics are in CSV only.
_SHOWN: tuple[tuple[str, str, int, Show], ...] = (
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
    ("token_hit_rate", "token\nhit rate", 3, _percent),
    ("batch_size", "batch\nmean", 6, _number),
    ("mean_waiting", "waiting\nmean", 6, _number),
    ("mean_running", "running\nmean", 7, _number),
    ("busy_fraction", "busy", 7, _percent),
    ("preemptions", "preemp-\ntions", 7, _number),
)


def serving_table(title: str, rows: Sequence[ServingRow], goals: Sequence[str], caveats: Sequence[str]) -> Table:
    """Return a table of every metric; columns without any value are omitted, and some are in CSV only."""
    goodput = tuple((f"request_goodput:{name}", f"goodput\n{name}", 1, _number) for name in goals)
    shown = {name: (heading, keep, show) for name, heading, keep, show in (*goodput, *_SHOWN)}
    present = dict.fromkeys([*shown, *(name for row in rows for name in row.values)])
    names = [name for name in present if any(name in row.values for row in rows)]
    loads = len({row.rate_rps for row in rows}) > 1
    columns = [Column("arm", "arm", left=True), Column("rate_rps", "rate" if loads else ""), Column("seeds", "")]
    lines = [[cells.word(row.arm), _rate(row), cells.hidden(row.seeds)] for row in rows]
    for name in names:
        heading, keep, show = shown.get(name, ("", 0, _number))
        columns += [Column(name, heading, keep), Column(f"{name}_low", ""), Column(f"{name}_high", "")]
        for line, row in zip(lines, rows, strict=True):
            line += _cells(row.values.get(name), show)
    several = any(row.seeds > 1 for row in rows)
    notes = (*_NOTES, *(["[a, b] = 95 % t interval over seeds"] if several else []), *caveats)
    return Table("serving", title, tuple(columns), tuple(map(tuple, lines)), notes)


def _rate(row: ServingRow) -> Cell:
    return MISSING if row.rate_rps is None else Cell(row.rate_rps, f"{row.rate_rps:g}/s")


def _cells(value: Interval | None, show: Show) -> tuple[Cell, Cell, Cell]:
    if value is None:
        return MISSING, cells.hidden(None), cells.hidden(None)
    ends = None if value.low is None or value.high is None else (value.low, value.high)
    return Cell(value.mean, show(value.mean, ends)), cells.hidden(value.low), cells.hidden(value.high)

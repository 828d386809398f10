"""The table of `analysis.prefill`: a row for each arm and combination of labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spanlab.report import cells
from spanlab.report.measures import interval
from spanlab.report.tables import MISSING, Cell, Column, Table

Entry = dict[str, Any]

_NOTES = (
    "TTFT of one request at a time, medians; bound = the slower of FLOPs ÷ measured matrix rate and bytes ÷ measured "
    "copy rate, for what the requests computed and moved",
    "speedup = summed TTFT of {baseline} ÷ summed TTFT of the arm on the same requests; [a, b] = 95 % interval; ratio "
    "of bounds = the same of both bounds, which bounds no speedup: a baseline far from its own bound exceeds it",
    "logits apart = largest |difference| of a first token's logits to those of {baseline} on the same prompt",
)


@dataclass(frozen=True)
class _Measure:
    """One column and its cell of an entry; an optional column is hidden where no entry has a value."""

    column: Column
    cell: Callable[[Entry], Cell]
    optional: bool = False

    def shown(self, entries: Sequence[Entry]) -> Column:
        """Return the column, hidden if it is optional and these entries have no value."""
        absent = self.optional and not any(self.cell(entry).value for entry in entries)
        return replace(self.column, heading="") if absent else self.column


def _time(point: str) -> Callable[[Entry], Cell]:
    return lambda entry: cells.hidden(entry["ttft_s"][point])


def _quartiles(entry: Entry) -> Cell:
    low, high = (cells.seconds(entry["ttft_s"][point]).text for point in ("p25", "p75"))
    return Cell(entry["ttft_s"]["p25"], f"{low} to {high}")


def _speedup(entry: Entry) -> Cell:
    speedup = entry["speedup"] or {}
    return cells.ratio(speedup.get("mean"), interval((speedup.get("low"), speedup.get("high"))))


def _gap(entry: Entry) -> Cell:
    value = entry["logit_gap"]
    return MISSING if value is None else Cell(value, f"{value:.1e}")


def _end(name: str) -> Callable[[Entry], Cell]:
    return lambda entry: cells.hidden((entry["speedup"] or {}).get(name))


_MEASURES = (
    _Measure(Column("requests", ""), lambda entry: cells.hidden(entry["requests"])),
    _Measure(Column("prompt_tokens", "prompt\ntokens"), lambda entry: cells.count(entry["prompt_tokens"])),
    _Measure(Column("token_hit_rate", "token\nhit rate", 1), lambda entry: cells.percent(entry["token_hit_rate"])),
    _Measure(Column("reused_tokens", ""), lambda entry: cells.hidden(entry["reused_tokens"])),
    _Measure(Column("computed_tokens", "computed\ntokens", 6), lambda entry: cells.count(entry["computed_tokens"])),
    _Measure(Column("repaired_tokens", "repaired\ntokens", 5), lambda e: cells.count(e["repaired_tokens"]), True),
    _Measure(Column("captured_states", "states\ncaptured", 5), lambda e: cells.count(e["captured_states"]), True),
    _Measure(Column("captured_bytes", "their\nbytes", 5), lambda e: cells.byte_size(e["captured_bytes"]), True),
    _Measure(Column("ttft_p50_s", "TTFT\np50"), lambda entry: cells.seconds(entry["ttft_s"]["p50"])),
    _Measure(Column("ttft_p25_s", "\nquartiles", 4), _quartiles),
    _Measure(Column("ttft_p75_s", ""), _time("p75")),
    _Measure(Column("ttft_least_s", ""), _time("least")),
    _Measure(Column("bound_s", "its\nbound", 3), lambda entry: cells.seconds(entry["bound_s"]), True),
    _Measure(Column("of_bound", "bound ÷\nTTFT", 3), lambda entry: cells.percent(entry["of_bound"]), True),
    _Measure(Column("speedup", "speedup\nof TTFT", 1), _speedup, True),
    _Measure(Column("speedup_low", ""), _end("low")),
    _Measure(Column("speedup_high", ""), _end("high")),
    _Measure(Column("logit_gap", "logits\napart", 5), _gap, True),
    _Measure(Column("ratio_of_bounds", "ratio of\nbounds", 2), lambda e: cells.ratio(e["ratio_of_bounds"]), True),
)


def prefill_table(entries: Sequence[Entry], labels: Sequence[str], baseline: str) -> Table:
    """Return a table of the entries, in their order; `labels` are the names of their label columns."""
    names = [Column(label, label, left=True) for label in labels]
    columns = (Column("arm", "arm", left=True), *names, *(measure.shown(entries) for measure in _MEASURES))
    rows = [
        (cells.word(entry["arm"]), *(_label(entry[label]) for label in labels), *(m.cell(entry) for m in _MEASURES))
        for entry in entries
    ]
    templates = _NOTES if any(entry["logit_gap"] for entry in entries) else _NOTES[:-1]
    notes = tuple(note.format(baseline=baseline) for note in templates)
    return Table("prefill", "Time to first token by kind of request", columns, tuple(rows), notes)


def _label(value: str | int) -> Cell:
    return Cell(value, f"{value:,}" if isinstance(value, int) else value)

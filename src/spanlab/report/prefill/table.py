"""The table of `analysis.prefill`: a row for each arm and combination of labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spanlab.report import units
from spanlab.report.cells import byte_size, count, hidden, number, percent, ratio, ratio_interval, seconds, word
from spanlab.report.fields import Field, tabulate, with_ends
from spanlab.report.tables import Cell, Table

Entry = dict[str, Any]

_NOTES = (
    "TTFT of one request at a time, medians; bound = the slower of FLOPs ÷ measured matrix rate and bytes ÷ measured "
    "copy rate, for what the requests computed and moved",
    "speedup = summed TTFT of {baseline} ÷ summed TTFT of the arm on the same requests; [a, b] = 95 % interval; ratio "
    "of bounds = the same of both bounds, which bounds no speedup: a baseline far from its own bound exceeds it",
    "logits apart = largest |difference| of a first token's logits to those of {baseline} on the same prompt",
)


def _quartiles(ttft_s: dict[str, float]) -> Cell:
    return Cell(ttft_s["p25"], f"{units.seconds(ttft_s['p25'])} to {units.seconds(ttft_s['p75'])}")


_NONE = (None, 0)  # nothing was measured, or there is nothing of this kind
_FIELDS = (
    Field("requests", "", hidden),
    Field("prompt_tokens", "prompt\ntokens", count),
    Field("token_hit_rate", "token\nhit rate", percent, keep=1),
    Field("reused_tokens", "", hidden),
    Field("computed_tokens", "computed\ntokens", count, keep=6),
    Field("repaired_tokens", "repaired\ntokens", count, keep=5, empty=_NONE),
    Field("captured_states", "states\ncaptured", count, keep=5, empty=_NONE),
    Field("captured_bytes", "their\nbytes", byte_size, keep=5, empty=_NONE),
    Field("ttft_p50_s", "TTFT\np50", seconds, "ttft_s.p50"),
    Field("ttft_p25_s", "\nquartiles", _quartiles, "ttft_s", 4),
    Field("ttft_p75_s", "", hidden, "ttft_s.p75"),
    Field("ttft_least_s", "", hidden, "ttft_s.least"),
    Field("bound_s", "its\nbound", seconds, keep=3, empty=_NONE),
    Field("of_bound", "bound ÷\nTTFT", percent, keep=3, empty=_NONE),
    *with_ends(Field("speedup", "speedup\nof TTFT", ratio_interval, keep=1, empty=_NONE)),
    Field("logit_gap", "logits\napart", number(".1e"), keep=5, empty=_NONE),
    Field("ratio_of_bounds", "ratio of\nbounds", ratio, keep=2, empty=_NONE),
)


def prefill_table(entries: Sequence[Entry], labels: Sequence[str], baseline: str) -> Table:
    """Return a table of the entries, in their order; `labels` are the names of their label columns."""
    names = [Field(label, label, _label, left=True) for label in labels]
    fields = (Field("arm", "arm", word, left=True), *names, *_FIELDS)
    templates = _NOTES if any(entry["logit_gap"] for entry in entries) else _NOTES[:-1]
    notes = [note.format(baseline=baseline) for note in templates]
    return tabulate("prefill", "Time to first token by kind of request", fields, entries, notes)


def _label(value: str | int) -> Cell:
    return Cell(value, f"{value:,}" if isinstance(value, int) else value)

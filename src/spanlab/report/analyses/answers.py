"""The table of the analysis `answers`: a row for each arm and combination of labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spanlab.report import cells
from spanlab.report.measures import interval
from spanlab.report.tables import MISSING, Cell, Column, Table

Entry = dict[str, Any]

_ACCURACY = (("exact", "exact\nmatch"), ("stated", "answer\nstated"), ("f1", "token\nF1"))
_NOTES = (
    "KL = mean over the answer's tokens of KL({baseline} ‖ arm), nats; top-1 = tokens with the same likeliest next "
    "token; greedy = answers that are equal under greedy decoding; all after the tokens that {baseline} chose",
    "floor = {baseline} against its own repeat; [a, b] = 95 % interval over questions; answer stated = the gold "
    "answer, and no other number where it is a number",
)


def answers_table(entries: Sequence[Entry], labels: Sequence[str], baseline: str) -> Table:
    """Return accuracy where answers were scored, and agreement with the baseline where logits were stored."""
    scored = any(entry["accuracy"] for entry in entries)
    compared = any(entry["agreement"] for entry in entries)
    columns = (
        Column("arm", "arm", left=True),
        *(Column(label, label, left=True) for label in labels),
        Column("questions", "questions"),
        *(Column(key, heading if scored else "") for key, heading in _ACCURACY),
        *(Column(key, heading if compared else "") for key, heading in (("kl", "KL"), ("kl_floor", "floor\nof KL"))),
        *(Column(key, key if compared else "") for key in ("top1", "greedy")),
    )
    rows = tuple(_row(entry, labels) for entry in entries)
    notes = tuple(note.format(baseline=baseline) for note in _NOTES)
    return Table("answers", "Answers and predictions of every arm", columns, rows, notes)


def _row(entry: Entry, labels: Sequence[str]) -> tuple[Cell, ...]:
    accuracy, agreement = entry["accuracy"] or {}, entry["agreement"] or {}
    return (
        cells.word(entry["arm"]),
        *(cells.word(str(entry[label])) for label in labels),
        cells.count(entry["n"]),
        *(_share(accuracy.get(key)) for key, _ in _ACCURACY),
        _nats(agreement.get("kl")),
        _nats(entry["floor"]["kl"] if entry["floor"] else None),
        *(_share(agreement.get(key)) for key in ("top1", "greedy")),
    )


def _share(estimate: Sequence[float | None] | None) -> Cell:
    if estimate is None or estimate[0] is None:
        return MISSING
    return cells.percent_between(estimate[0], interval((estimate[1], estimate[2])))


def _nats(estimate: Sequence[float | None] | None) -> Cell:
    if estimate is None or estimate[0] is None:
        return MISSING
    ends = interval((estimate[1], estimate[2]))
    ends_text = "" if ends is None else f" [{ends[0]:.2g}, {ends[1]:.2g}]"
    return Cell(estimate[0], f"{estimate[0]:.3g}{ends_text}")

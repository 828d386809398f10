"""The table of the analysis `answers`: a row for each arm and combination of labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spanlab.report import cells
from spanlab.report.fields import Field, tabulate
from spanlab.report.tables import Table
from spanlab.report.units import Ends

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
    divergence = cells.estimate(_short_nats)
    fields = (
        Field("arm", "arm", cells.word, left=True),
        *(Field(label, label, lambda value: cells.word(str(value)), left=True) for label in labels),
        Field("questions", "questions", cells.count, "n"),
        *(
            Field(key, heading if scored else "", cells.percent_interval, f"accuracy.{key}")
            for key, heading in _ACCURACY
        ),
        Field("kl", "KL" if compared else "", divergence, "agreement.kl"),
        Field("kl_floor", "floor\nof KL" if compared else "", divergence, "floor.kl"),
        *(
            Field(key, key if compared else "", cells.percent_interval, f"agreement.{key}")
            for key in ("top1", "greedy")
        ),
    )
    notes = [note.format(baseline=baseline) for note in _NOTES]
    return tabulate("answers", "Answers and predictions of every arm", fields, entries, notes)


def _short_nats(value: float, ends: Ends | None) -> str:
    return f"{value:.3g}" if ends is None else f"{value:.3g} [{ends[0]:.2g}, {ends[1]:.2g}]"

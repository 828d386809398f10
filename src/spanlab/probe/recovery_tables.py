"""Tables of `tail_replay`: predictions and states after recoveries, states in fewer bytes, FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spanlab.probe.recovery_scores import RecoveryResult
from spanlab.probe.replay_price_scores import Price
from spanlab.report.cells import Cell, Table, hidden, percent, word
from spanlab.report.table import Field, tabulate, whole, with_ends


def _small(value: float) -> Cell:
    return Cell(value, f"{value:.2g}" if value >= 1e-3 or not value else f"{value:.0e}")


def _case(row: RecoveryResult) -> str:
    return f"{row.source.name}, {max(row.source.below)}, {row.gap}"


_CASE = (
    Field("case", "weights, attention\nlayers, gap", word, _case, left=True),
    Field("weights", "", hidden, "source.name"),
    Field("attention_below", "", hidden, lambda row: max(row.source.below)),
    Field("gap", "", hidden),
)
_ARM = Field("arm", "instead of\nrecompute", word, left=True)
_PREDICTED = (
    *with_ends(Field("kl", "KL, nats", lambda kl: _small(kl.mean))),
    *with_ends(Field("same", "same likeliest\ntoken", lambda same: percent(same.mean))),
    Field("right", "right\nanswers", percent),
)
_ERROR = Field("state_error", "error of the\ndeepest states", _small, "errors.-1")


def recovery_table(measurements: Sequence[RecoveryResult]) -> Table:
    """One row per model, gap and recovery."""
    notes = (
        "Attention layers: those below the deepest recurrent layers",
        "KL(recompute ‖ arm) of the next token, mean over questions",
        "Error of states: ‖S − S*‖ ÷ ‖S*‖, S* after recompute; mean over prompts and over the deepest recurrent layers",
    )
    fields = (*_CASE, _ARM, *_PREDICTED, _ERROR)
    return tabulate("recoveries", "Predictions where KV reaches deeper than the state", fields, measurements, notes)


def layers_table(measurements: Sequence[RecoveryResult]) -> Table:
    """Return the error of states by the attention layers below them, for the models with most of these layers."""
    deepest = max(len(row.errors) for row in measurements)
    rows = [row for row in measurements if len(row.errors) == deepest]
    errors = [
        Field(f"below_{count}", f"{count} attention\nbelow", _small, f"errors.{count}") for count in range(deepest)
    ]
    title = "Error of recurrent states by the attention layers below them"
    return tabulate("state_errors", title, (*_CASE, _ARM, *errors), rows)


def stored_table(measurements: Sequence[RecoveryResult]) -> Table:
    """One row per model, gap and format."""
    notes = (
        "The gap is recomputed exactly, from the stored state",
        "A row of a state is a key channel, a column a value channel",
    )
    stored = (
        Field("format", "state\nstored as", word, "arm", left=True),
        Field("bytes", "bytes of\nfloat32", percent, "nbytes"),
    )
    title = "Predictions after a state that was stored in fewer bytes"
    return tabulate("stored_states", title, (*_CASE, *stored, *_PREDICTED, _ERROR), measurements, notes)


def price_table(prices: Sequence[Price]) -> Table:
    """One row per model and context."""
    fields = (
        Field("case", "model, context", _model_context, whole, left=True),
        *(Field(name, "", hidden) for name in ("model", "context", "gap")),
        *(Field(name, name.replace(", ", ",\n"), percent) for name in prices[0].shares),
    )
    rows = [vars(price) | price.shares for price in prices]
    notes = (f"Gaps of {prices[0].gap:,} tokens behind so many tokens of context",)
    return tabulate("prices", "FLOPs of a replay ÷ FLOPs of recompute", fields, rows, notes)


def _model_context(price: dict[str, Any]) -> Cell:
    model, context = price["model"], price["context"]
    return Cell(f"{model} {context}", f"{model}, {context:,}")

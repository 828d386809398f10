"""Tables of `tail_replay`: predictions and states after recoveries, states in fewer bytes, FLOPs."""

from __future__ import annotations

from collections.abc import Sequence

from spanlab.analysis.recovery import RecoveryResult
from spanlab.analysis.replay_price import Price
from spanlab.report.tables import MISSING, Cell, Column, Table
from spanlab.report.units import percent

_CASE_COLUMNS = (
    Column("case", "weights, attention\nlayers, gap", left=True),
    *(Column("weights", ""), Column("attention_below", ""), Column("gap", "")),
)
_ARM = Column("arm", "instead of\nrecompute", left=True)
_PREDICTED = (
    *(Column("kl", "KL, nats"), Column("kl_low", ""), Column("kl_high", "")),
    *(Column("same", "same likeliest\ntoken"), Column("same_low", ""), Column("same_high", "")),
    Column("right", "right\nanswers"),
)
_ERROR = Column("state_error", "error of the\ndeepest states")


def recovery_table(measurements: Sequence[RecoveryResult]) -> Table:
    """One row per model, gap and recovery."""
    notes = (
        "Attention layers: those below the deepest recurrent layers",
        "KL(recompute ‖ arm) of the next token, mean over questions",
        "Error of states: ‖S − S*‖ ÷ ‖S*‖, S* after recompute; mean over prompts and over the deepest recurrent layers",
    )
    columns = (*_CASE_COLUMNS, _ARM, *_PREDICTED, _ERROR)
    rows = tuple(
        (*_case_cells(row), Cell(row.arm, row.arm), *_predicted(row), _small(row.errors[-1])) for row in measurements
    )
    return Table("recoveries", "Predictions where KV reaches deeper than the state", columns, rows, notes)


def layers_table(measurements: Sequence[RecoveryResult]) -> Table:
    """Return the error of states by the attention layers below them, for the models with most of these layers."""
    deepest = max(len(row.errors) for row in measurements)
    rows = [row for row in measurements if len(row.errors) == deepest]
    columns = (
        *_CASE_COLUMNS,
        _ARM,
        *(Column(f"below_{count}", f"{count} attention\nbelow") for count in range(deepest)),
    )
    cells = tuple((*_case_cells(row), Cell(row.arm, row.arm), *map(_small, row.errors)) for row in rows)
    title = "Error of recurrent states by the attention layers below them"
    return Table("state_errors", title, columns, cells)


def stored_table(measurements: Sequence[RecoveryResult]) -> Table:
    """One row per model, gap and format."""
    notes = (
        "The gap is recomputed exactly, from the stored state",
        "A row of a state is a key channel, a column a value channel",
    )
    columns = (*_CASE_COLUMNS, Column("format", "state\nstored as", left=True), Column("bytes", "bytes of\nfloat32"))
    rows = tuple(
        (*_case_cells(row), Cell(row.arm, row.arm), _share(row.nbytes), *_predicted(row), _small(row.errors[-1]))
        for row in measurements
    )
    title = "Predictions after a state that was stored in fewer bytes"
    return Table("stored_states", title, (*columns, *_PREDICTED, _ERROR), rows, notes)


def price_table(prices: Sequence[Price]) -> Table:
    """One row per model and context."""
    names = list(prices[0].shares)
    columns = (
        Column("case", "model, context", left=True),
        *(Column("model", ""), Column("context", ""), Column("gap", "")),
        *(Column(name, name.replace(", ", ",\n")) for name in names),
    )
    rows = tuple(
        (
            Cell(f"{price.model} {price.context}", f"{price.model}, {price.context:,}"),
            *(Cell(price.model, ""), Cell(price.context, ""), Cell(price.gap, "")),
            *(_share(price.shares[name]) for name in names),
        )
        for price in prices
    )
    notes = (f"Gaps of {prices[0].gap:,} tokens behind so many tokens of context",)
    return Table("prices", "FLOPs of a replay ÷ FLOPs of recompute", columns, rows, notes)


def _case_cells(row: RecoveryResult) -> tuple[Cell, ...]:
    below = max(row.source.below)
    case = f"{row.source.name}, {below}, {row.gap}"
    return Cell(case, case), Cell(row.source.name, ""), Cell(below, ""), Cell(row.gap, "")


def _predicted(row: RecoveryResult) -> tuple[Cell, ...]:
    kl, same = row.kl, row.same
    return (
        *(_small(kl.mean), Cell(kl.low, ""), Cell(kl.high, "")),
        *(Cell(same.mean, percent(same.mean)), Cell(same.low, ""), Cell(same.high, "")),
        MISSING if row.right is None else _share(row.right),
    )


def _share(value: float) -> Cell:
    return Cell(value, percent(value))


def _small(value: float) -> Cell:
    return Cell(value, f"{value:.2g}" if value >= 1e-3 or not value else f"{value:.0e}")

"""Tables of the analysis `twin`: errors on requests outside the fit, parameters, and the server's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spanlab.report.cells import seconds, word
from spanlab.report.tables import MISSING, Cell, Column, Table
from spanlab.report.units import significant

Summary = Mapping[str, Any]
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E latency"}


def tables_of(summary: Summary, title: str, caveats: tuple[str, ...]) -> tuple[Table, ...]:
    """Return all tables; `caveats` are notes of the first table."""
    return _errors(summary, title, caveats), _parameters(summary), _server(summary)


def _errors(summary: Summary, title: str, caveats: tuple[str, ...]) -> Table:
    split = summary["split"]
    head = f"fitted to the first {split['train']:,} requests, tested on the {split['test']:,} that arrived later"
    columns = (
        Column("metric", "metric", left=True),
        Column("mean_s", "measured\nmean"),
        Column("mean_error", "error of\nthe mean"),
        Column("p50_error", "median\n|error|"),
        Column("p95_error", "p95\n|error|"),
        Column("bias", "bias", 2),
        Column("seen_mean_error", "mean, of\nthose seen", 4),
        Column("seen_p50_error", "median, of\nthose seen", 3),
    )
    rows = tuple(
        (
            word(name),
            seconds(summary["means_s"][metric]),
            *(_error(summary["unseen"][metric][key]) for key in ("mean_error", "p50_error", "p95_error", "bias")),
            *(_error(summary["seen"][metric][key]) for key in ("mean_error", "p50_error")),
        )
        for metric, name in NAMES.items()
    )
    notes = (
        "error: predicted ÷ measured - 1, per request but for that of the mean; bias: its median",
        "all requests are simulated from the first on; of the test requests, the fit uses arrivals and lengths only",
        *caveats,
    )
    return Table("twin", f"{title}\n{head}", columns, rows, notes)


def _error(value: float | None) -> Cell:
    return MISSING if value is None else Cell(value, f"{100 * value:+.2f} %")


def _parameters(summary: Summary) -> Table:
    columns = (
        Column("parameter", "parameter", left=True),
        Column("value", "value"),
        Column("low", "from"),
        Column("high", "to"),
        Column("identified", "identified", 2),
    )
    rows = tuple(
        (
            word(name),
            *(Cell(parameter[key], significant(parameter[key])) for key in ("value", "low", "high")),
            Cell(parameter["identified"], "yes" if parameter["identified"] else "no"),
        )
        for name, parameter in summary["parameters"].items()
    )
    notes = ("from, to: 95 % interval; errors within a tenth of the requests count as one",)
    return Table("parameters", "What the log says of the server", columns, rows, notes)


def _server(summary: Summary) -> Table:
    blocks = summary["blocks"]
    rows = (
        *((word(name), word(value)) for name, value in summary["server"].items()),
        (word("blocks in use, at most"), word(f"{blocks['most_used']:,} of {blocks['usable']:,}")),
        (word("preemptions, simulated"), word(f"{summary['preemptions']:,}")),
    )
    columns = (Column("setting", "setting", left=True), Column("value", "value", left=True))
    return Table("server", "The server as it was run", columns, rows)

"""Tables of the analysis `twin`: errors on requests outside the fit, parameters, and the server's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spanlab.report.cells import seconds, short, word
from spanlab.report.fields import Field, tabulate
from spanlab.report.tables import MISSING, Cell, Table

Summary = Mapping[str, Any]
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E latency"}
PREDICTORS = {"twin": "twin", "line": "line", "mean": "mean", "last": "last value"}


def _error(value: float | None) -> Cell:
    return MISSING if value is None else Cell(value, f"{100 * value:+.2f} %")


_ERRORS = (
    Field("metric", "metric", word, left=True),
    Field("predictor", "predictor", word, left=True),
    Field("mean_s", "measured\nmean", seconds),
    Field("mean_error", "error of\nthe mean", _error),
    Field("p50_error", "median\n|error|", _error),
    Field("p95_error", "p95\n|error|", _error),
    Field("bias", "bias", _error, keep=2),
    Field("seen_mean_error", "mean, of\nthose seen", _error, "seen.mean_error", 4),
    Field("seen_p50_error", "median, of\nthose seen", _error, "seen.p50_error", 3),
)
_PARAMETERS = (
    Field("parameter", "parameter", word, left=True),
    Field("value", "value", short),
    Field("low", "from", short),
    Field("high", "to", short),
    Field("identified", "identified", lambda value: Cell(value, "yes" if value else "no"), keep=2),
)
_SETTINGS = (Field("setting", "setting", word, left=True), Field("value", "value", word, left=True))


def tables_of(summary: Summary, title: str, caveats: tuple[str, ...]) -> tuple[Table, ...]:
    """Return all tables; `caveats` are notes of the first table."""
    return _errors(summary, title, caveats), _parameters(summary), _server(summary)


def _errors(summary: Summary, title: str, caveats: tuple[str, ...]) -> Table:
    split = summary["split"]
    head = f"fitted to the first {split['train']:,} requests, tested on the {split['test']:,} that arrived later"
    by_predictor = {"twin": summary, **summary["without_model"]}
    rows = [
        {"metric": name, "predictor": title, "mean_s": summary["means_s"][metric], "seen": errors["seen"][metric]}
        | errors["unseen"][metric]
        for metric, name in NAMES.items()
        for title, errors in ((PREDICTORS[predictor], errors) for predictor, errors in by_predictor.items())
    ]
    notes = (
        "error: predicted ÷ measured - 1, per request but for that of the mean; bias: its median",
        "all requests are simulated from the first on; of the test requests, the fit uses arrivals and lengths only",
        "line, mean, last value: fitted to the same first requests, without a model of the server; line: over the "
        "request's number, for E2E latency also over its output tokens",
        *caveats,
    )
    return tabulate("twin", f"{title}\n{head}", _ERRORS, rows, notes)


def _parameters(summary: Summary) -> Table:
    rows = [{"parameter": name, **parameter} for name, parameter in summary["parameters"].items()]
    notes = ("from, to: 95 % interval; errors within a tenth of the requests count as one",)
    return tabulate("parameters", "What the log says of the server", _PARAMETERS, rows, notes)


def _server(summary: Summary) -> Table:
    blocks = summary["blocks"]
    settings = summary["server"] | {
        "blocks in use, at most": f"{blocks['most_used']:,} of {blocks['usable']:,}",
        "preemptions, simulated": f"{summary['preemptions']:,}",
    }
    rows = [{"setting": name, "value": value} for name, value in settings.items()]
    return tabulate("server", "The server as it was run", _SETTINGS, rows)

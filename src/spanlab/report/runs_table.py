"""Tables that compare finished runs: differences per arm, and the settings that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spanlab.analysis.differences import ArmDifferences, Difference
from spanlab.report import cells, units
from spanlab.report.tables import MISSING, Cell, Column, Table

_NOTES = (
    "differences are over paired requests: the same request, seed and arrival time in both runs; token hit rate: run − "
    "first, in points; TTFT, E2E: mean of run ÷ mean of first",
    "[a, b] = 95 % interval over groups (documents) and seeds, by bootstrap; same = equal for every request; not shown "
    "= the interval includes no difference",
)
_COLUMNS = (
    Column("token_hit_rate_first", "hit rate,\nfirst", 2),
    Column("token_hit_rate_run", "hit rate,\nrun", 2),
    Column("token_hit_rate_difference", "token hit rate,\ndifference", left=True),
    Column("token_hit_rate_difference_low", ""),
    Column("token_hit_rate_difference_high", ""),
    Column("token_hit_rate_verdict", ""),
    Column("ttft_mean_first_s", "TTFT,\nfirst", 3),
    Column("ttft_mean_run_s", "TTFT,\nrun", 3),
    Column("ttft_ratio", "TTFT,\nratio", left=True),
    Column("ttft_ratio_low", ""),
    Column("ttft_ratio_high", ""),
    Column("ttft_verdict", ""),
    Column("e2e_ratio", "E2E,\nratio", 4, left=True),
    Column("e2e_ratio_low", ""),
    Column("e2e_ratio_high", ""),
    Column("e2e_verdict", ""),
    Column("paired_requests", "paired\nrequests", 5),
    Column("paired_seeds", "", 5),
)


@dataclass(frozen=True)
class ArmRow:
    """One arm of a run, compared with the first run.

    hits, ttft_s  token hit rate and mean TTFT of the first run and of this one, over all their seeds
    differences   paired differences; None where requests cannot be paired
    reason        why requests cannot be paired
    """

    arm: str
    run: str
    hits: tuple[float, float]
    ttft_s: tuple[float | None, float | None]
    differences: ArmDifferences | None
    reason: str = ""


def arms_table(title: str, rows: Sequence[ArmRow], several: bool, notes: Sequence[str] = ()) -> Table:
    """Return the differences by arm; `several` adds a column that names the run."""
    columns = (Column("arm", "arm", left=True), Column("run", "run" if several else "", left=True), *_COLUMNS)
    lines = tuple((cells.word(row.arm), cells.word(row.run), *_cells(row)) for row in rows)
    return Table("arms", title, columns, lines, (*_NOTES, *notes))


def _cells(row: ArmRow) -> tuple[Cell, ...]:
    differences = row.differences
    return (
        *map(cells.percent, row.hits),
        *_difference(differences.token_hit_rate if differences else None, row.reason, _points),
        *map(cells.seconds, row.ttft_s),
        *_difference(differences.ttft if differences else None, row.reason, units.ratio),
        *_difference(differences.e2e if differences else None, row.reason, units.ratio),
        Cell(differences.requests, f"{differences.requests:,}") if differences else MISSING,
        cells.hidden(differences.seeds if differences else None),
    )


def _difference(
    difference: Difference | None, reason: str, format_value: Callable[[float, units.Ends | None], str]
) -> tuple[Cell, Cell, Cell, Cell]:
    """Return cells of a difference as text, of the ends of its interval, and of its verdict."""
    if difference is None:
        verdict = f"cannot be paired: {reason}" if reason else "saturated"
        return cells.placeholder(verdict), cells.hidden(None), cells.hidden(None), cells.hidden(verdict)
    value, low, high = difference.interval
    ends = None if low is None or high is None else (low, high)
    shown = format_value(value, ends)
    texts = {"same": "same", "differs": f"differs by {shown}", "not shown": f"not shown: {shown}"}
    text = texts.get(difference.verdict, f"{shown}, no interval")
    return Cell(value, text), cells.hidden(low), cells.hidden(high), cells.hidden(difference.verdict)


def _points(value: float, ends: units.Ends | None) -> str:
    """A difference of shares in percentage points: +1.23 [1.02, 1.44] points."""
    between = "" if ends is None else f" [{100 * ends[0]:.2f}, {100 * ends[1]:.2f}]"
    return f"{100 * value:+.2f}{between} points"


def settings_table(names: Sequence[str], settings: Mapping[str, tuple[str, ...]]) -> Table:
    """Settings that differ, one column per run."""
    columns = (Column("setting", "setting", left=True), *(Column(name, name, left=True) for name in names))
    rows = tuple((cells.word(key), *map(cells.word, values)) for key, values in settings.items())
    notes = () if rows else ("no setting differs",)
    return Table("settings_that_differ", "Settings that differ", columns, rows, notes)


_SERVING_NOTES = (
    "metrics by the names of vLLM's benchmark, mean over seeds; ratio = run ÷ first",
    "error of single requests = |run − first| ÷ first over paired requests; empty where they cannot be paired",
)


@dataclass(frozen=True)
class ServingDifference:
    """One metric of one arm.

    values  the metric in the first run and in this one
    errors  median and p95 of the relative differences of single requests; None where requests cannot be paired
    """

    arm: str
    run: str
    metric: str
    values: tuple[float, float]
    errors: tuple[float, float] | None


def serving_differences(title: str, rows: Sequence[ServingDifference], several: bool) -> Table:
    """Return one row per arm and metric; `several` adds a column that names the run."""
    columns = (
        Column("arm", "arm", left=True),
        Column("run", "run" if several else "", left=True),
        Column("metric", "metric", left=True),
        Column("first", "first"),
        Column("run_value", "run"),
        Column("ratio", "ratio"),
        Column("error_p50", "error of\nrequests, p50", 1),
        Column("error_p95", "error of\nrequests, p95", 1),
    )
    lines = []
    for row in rows:
        first, run = row.values
        ratio = cells.ratio(run / first) if first else MISSING
        errors = (MISSING, MISSING) if row.errors is None else tuple(map(cells.percent, row.errors))
        names = map(cells.word, (row.arm, row.run, row.metric))
        lines.append((*names, *(Cell(value, f"{value:,.4g}") for value in row.values), ratio, *errors))
    return Table("serving", title, columns, tuple(lines), _SERVING_NOTES)

"""Tables that compare finished runs: differences per arm, and the settings that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spanlab.analysis.differences import ArmDifferences, Difference
from spanlab.report import cells, units
from spanlab.report.fields import Field, tabulate, whole
from spanlab.report.tables import Cell, Column, Table

Show = Callable[[float, units.Ends | None], str]

_NOTES = (
    "all columns are over paired requests: the same request, seed and arrival time in both runs; where requests cannot "
    "be paired, over all requests of each run",
    "differences of token hit rate: run − first, in points; of TTFT, E2E: mean of run ÷ mean of first",
    "[a, b] = 95 % interval over groups (documents) and seeds, by bootstrap; same = equal for every request; not shown "
    "= the interval includes no difference; each difference is tested alone: one in twenty that are zero differs by "
    "chance",
)


@dataclass(frozen=True)
class ArmRow:
    """One arm of a run, compared with the first run.

    hits, ttft_s  token hit rate and mean TTFT of the first run and of this one: over paired requests, else over all
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
    fields = (*_names(several), *_FIELDS)
    return tabulate("arms", title, fields, rows, (*_NOTES, *notes))


def _names(several: bool) -> tuple[Field, ...]:
    run = Field("run", "run" if several else "", cells.word, left=True)
    return Field("arm", "arm", cells.word, left=True), run


def _difference(name: str, heading: str, of: str, show: Show, keep: int = 0) -> tuple[Field, ...]:
    """Return fields of a difference as text, of the ends of its interval, and of its verdict."""
    return (
        Field(name, heading, lambda row: _text(row, of, show), whole, keep, left=True),
        Field(f"{name}_low", "", cells.hidden, f"differences.{of}.interval.low"),
        Field(f"{name}_high", "", cells.hidden, f"differences.{of}.interval.high"),
        Field(f"{of}_verdict", "", cells.hidden, lambda row: _verdict(row, of)),
    )


def _verdict(row: ArmRow, of: str) -> str:
    difference: Difference | None = getattr(row.differences, of, None)
    if difference is not None:
        return difference.verdict
    return f"cannot be paired: {row.reason}" if row.reason else "saturated"


def _text(row: ArmRow, of: str, show: Show) -> Cell:
    difference: Difference | None = getattr(row.differences, of, None)
    verdict = _verdict(row, of)
    if difference is None:
        return cells.placeholder(verdict)
    shown = show(difference.interval.mean, difference.interval.ends)
    texts = {"same": "same", "differs": f"differs by {shown}", "not shown": f"not shown: {shown}"}
    return Cell(difference.interval.mean, texts.get(verdict, f"{shown}, no interval"))


def _points(value: float, ends: units.Ends | None) -> str:
    """A difference of shares in percentage points: +1.23 [1.02, 1.44] points."""
    between = "" if ends is None else f" [{100 * ends[0]:.2f}, {100 * ends[1]:.2f}]"
    return f"{100 * value:+.2f}{between} points"


_FIELDS = (
    Field("token_hit_rate_first", "hit rate,\nfirst", cells.percent, "hits.0", 2),
    Field("token_hit_rate_run", "hit rate,\nrun", cells.percent, "hits.1", 2),
    *_difference("token_hit_rate_difference", "token hit rate,\ndifference", "token_hit_rate", _points),
    Field("ttft_mean_first_s", "TTFT,\nfirst", cells.seconds, "ttft_s.0", 3),
    Field("ttft_mean_run_s", "TTFT,\nrun", cells.seconds, "ttft_s.1", 3),
    *_difference("ttft_ratio", "TTFT,\nratio", "ttft", units.ratio),
    *_difference("e2e_ratio", "E2E,\nratio", "e2e", units.ratio, 4),
    Field("paired_requests", "paired\nrequests", cells.number(","), "differences.requests", 5),
    Field("paired_seeds", "", cells.hidden, "differences.seeds", 5),
)


def settings_table(names: Sequence[str], settings: Mapping[str, tuple[str, ...]]) -> Table:
    """Settings that differ, one column per run."""
    columns = (Column("setting", "setting", left=True), *(Column(name, name, left=True) for name in names))
    rows = tuple((cells.word(key), *map(cells.word, values)) for key, values in settings.items())
    notes = () if rows else ("no setting differs",)
    return Table("settings_that_differ", "Settings that differ", columns, rows, notes)


_SERVING_NOTES = (
    "metrics by the names of vLLM's benchmark, mean over all seeds of each run, paired or not; ratio = run ÷ first",
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
    fields = (
        *_names(several),
        Field("metric", "metric", cells.word, left=True),
        Field("first", "first", cells.number(",.4g"), "values.0"),
        Field("run_value", "run", cells.number(",.4g"), "values.1"),
        Field("ratio", "ratio", cells.ratio, lambda row: row.values[1] / row.values[0] if row.values[0] else None),
        Field("error_p50", "error of\nrequests, p50", cells.percent, "errors.0", 1),
        Field("error_p95", "error of\nrequests, p95", cells.percent, "errors.1", 1),
    )
    return tabulate("serving", title, fields, rows, _SERVING_NOTES)

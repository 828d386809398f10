"""Comparison of finished runs, request by request."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from spanlab.provenance import run_facts
from spanlab.records import delays_of
from spanlab.registry import REQUIRED, entry
from spanlab.report import table
from spanlab.report.table import (
    Cell,
    Column,
    Ends,
    Field,
    Page,
    Table,
    facts_of,
    hidden,
    number_format,
    percent,
    placeholder,
    ratio_text,
    seconds,
    tabulate,
    whole,
    word,
    write_page,
)
from spanlab.settings.arms import differing
from spanlab.settings.server import OutputSettings
from spanlab.stats import SATURATED, Clusters, Interval, describe_few, positive_ratio, ratio
from spanlab.study.folder import (
    CONFIG,
    SUMMARY,
    check_keys,
    entry_folder,
    publish,
    read_settings,
    read_summary,
    write_results,
)
from spanlab.study.numbers import Columns, at_rate, read_records, select

# ------------------------------------------------------------------------------
# Finished runs, read from their folders for `compare`.
# ------------------------------------------------------------------------------

# of a summary, for a comparison
_NEEDED = ("commit", "machine", "caveats", "failed", "model", "workload.detail")
_NEEDED_OF_ARM = ("token_hit_rate", "ttft_s.mean", "stationarity.verdict", "seeds")


@dataclass(frozen=True)
class FinishedRun:
    """A finished study: its folder, and its name in the comparison."""

    folder: Path
    name: str

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Contents of `summary.json`."""
        summary = read_summary(self.folder, *_NEEDED)
        path = self.folder / SUMMARY
        arms, rows = summary.get("arms", {}), summary.get("serving", [])
        if not isinstance(arms, dict) or not isinstance(rows, list):
            raise ValueError(
                f"{path}: arms or serving: expected the folder of a run that this version finished"
            )
        for name in arms:
            check_keys(path, arms[name], _NEEDED_OF_ARM)
        for row in rows:
            check_keys(path, row, ("arm", "rate_rps", "metrics"))
        return summary

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings, fingerprint of the requests, commit and machine."""
        origin = {name: self.summary[name] for name in ("commit", "machine")}
        path = self.folder / CONFIG
        try:
            settings = read_settings(path.read_text())
        except (ValueError, TypeError, YAMLError, OmegaConfBaseException) as error:
            raise ValueError(f"{path}: expected the settings of a finished run, as YAML") from error
        check_keys(path, settings, ("arrivals.rate_rps",))
        return settings | origin

    def records(self, arm: str) -> Columns:
        """Records of an arm at the study's load."""
        path = self.folder / "records" / f"{arm}.jsonl"
        try:
            columns = read_records(path)
        except (ValueError, OSError) as error:
            raise ValueError(f"{path}: expected records of this version: {error}") from error
        rows = at_rate(columns, self.settings["arrivals"]["rate_rps"])
        seeds = (
            self.summary["arms"][arm]["seeds"] if "arms" in self.summary else self.summary["seeds"]
        )
        return select(columns, rows & np.isin(columns["seed"], seeds))

    @cached_property
    def serving(self) -> dict[str, dict[str, Any]]:
        """Serving metrics of each arm at the study's load; empty where the study did not compute
        them."""
        rate = self.settings["arrivals"]["rate_rps"]
        rows = self.summary.get("serving", ())
        return {row["arm"]: row["metrics"] for row in rows if row["rate_rps"] == rate}

    def saturated(self, arm: str) -> bool:
        """Whether the arm's queue grows."""
        return bool(self.summary["arms"][arm]["stationarity"]["verdict"] == SATURATED)


def finished_runs(paths: Sequence[str]) -> list[FinishedRun]:
    """Return the runs in these folders; a run's name is the folder's name, or its path where names
    are equal."""
    folders = [Path(text) for text in paths]
    counts = Counter(folder.resolve().name for folder in folders)
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(f"runs={paths}: expected different runs")
    runs = []
    for folder in folders:
        if not (folder / "summary.json").is_file():
            raise ValueError(f"runs={folder}: expected the folder of a finished run")
        run = FinishedRun(
            folder, str(folder) if counts[folder.resolve().name] > 1 else folder.resolve().name
        )
        if "arms" not in run.summary and not run.serving:
            raise ValueError(
                f"runs={folder}: expected a study; compare the points of a sweep one by one"
            )
        runs.append(run)
    return runs


# ------------------------------------------------------------------------------
# The requests of two runs of an arm, paired by seed and request.
# ------------------------------------------------------------------------------

PairedColumns = dict[str, NDArray[Any]]

#: Fields that must be equal within a pair.
_SAME_REQUEST = ("group_id", "prompt_tokens", "output_tokens")
_CLOSE_S = 1e-9  # times are whole nanoseconds, stored as seconds


class UnpairedError(ValueError):
    """Two runs whose requests cannot be paired; the message is the reason."""


@dataclass(frozen=True)
class Pairs:
    """Requests that both runs counted, in one order.

    first, other  fields of records, each of shape (n,)
    """

    first: PairedColumns
    other: PairedColumns

    @property
    def seeds(self) -> int:
        """Number of seeds with pairs."""
        return len(np.unique(self.first["seed"]))

    def clusters(self) -> Clusters:
        """Return clusters of the pairs by seed and group."""
        return Clusters.of(self.first["seed"], self.first["group_id"])


def paired(first: PairedColumns, other: PairedColumns) -> Pairs:
    """Return the paired requests of the seeds that both runs have.

    Raise UnpairedError where no seed is common, or where requests or arrival times of a common seed
    differ.
    """
    seeds = np.intersect1d(first["seed"], other["seed"])
    if not seeds.size:
        raise UnpairedError("no common seed")
    a, b = (_select(columns, np.isin(columns["seed"], seeds)) for columns in (first, other))
    a, b = (_select(run, np.lexsort((run["request_id"], run["seed"]))) for run in (a, b))
    if not np.array_equal(a["request_id"], b["request_id"]) or not np.array_equal(
        a["seed"], b["seed"]
    ):
        raise UnpairedError("requests differ")
    if any(not np.array_equal(a[name], b[name]) for name in _SAME_REQUEST):
        raise UnpairedError("requests differ")
    if not np.allclose(a["arrived_s"], b["arrived_s"], rtol=0, atol=_CLOSE_S):
        raise UnpairedError("arrivals differ")
    counted = a["counted"].astype(bool) & b["counted"].astype(bool)
    if not counted.any():
        raise UnpairedError("no request is counted in both")
    return Pairs(_select(a, counted), _select(b, counted))


def _select(columns: PairedColumns, rows: NDArray[Any]) -> PairedColumns:
    return {name: values[rows] for name, values in columns.items()}


# ------------------------------------------------------------------------------
# Differences between two runs of an arm over paired requests, with intervals and verdicts.
# ------------------------------------------------------------------------------

#: same: every pair is equal; differs: the interval excludes zero difference; not shown: it includes
#: it; no interval: one seed and one group give none.
Verdict = Literal["same", "differs", "not shown", "no interval"]


@dataclass(frozen=True)
class Difference:
    """The second run compared with the first: a difference of shares or a ratio of means, with its
    95 % interval."""

    verdict: Verdict
    interval: Interval


@dataclass(frozen=True)
class ArmDifferences:
    """One arm in two runs, over paired requests.

    hit_rates, ttft_means_s  token hit rate and mean TTFT of either run
    ttft, e2e  None where the arm is saturated in a run: its mean delays grow with the run
    """

    requests: int
    seeds: int
    groups: int
    hit_rates: tuple[float, float]
    ttft_means_s: tuple[float, float]
    token_hit_rate: Difference
    ttft: Difference | None
    e2e: Difference | None


def differences(pairs: Pairs, saturated: bool) -> ArmDifferences:
    """Return the differences of one arm; no ratios of delays for a saturated arm."""
    delays = (None, None) if saturated else (mean_ttft(pairs), mean_e2e(pairs))
    first, other = pairs.first, pairs.other
    return ArmDifferences(
        len(first["seed"]),
        pairs.seeds,
        len(np.unique(first["group_id"])),
        (_hit_rate(first), _hit_rate(other)),
        (float(delays_of(first)["ttft_s"].mean()), float(delays_of(other)["ttft_s"].mean())),
        token_hit_rate(pairs),
        *delays,
    )


def _hit_rate(columns: PairedColumns) -> float:
    return float(columns["reused_tokens"].sum() / columns["prompt_tokens"].sum())


def token_hit_rate(pairs: Pairs) -> Difference:
    """Return the token hit rate of the other run − that of the first, as a share of prompt
    tokens."""
    clusters = pairs.clusters()
    gained = clusters.sums(pairs.other["reused_tokens"] - pairs.first["reused_tokens"])
    interval = ratio(gained, clusters.sums(pairs.first["prompt_tokens"]))
    same = np.array_equal(pairs.other["reused_tokens"], pairs.first["reused_tokens"])
    return Difference(_differences_verdict(interval, 0.0, same), interval)


def mean_ttft(pairs: Pairs) -> Difference:
    """Return the mean TTFT of the other run ÷ that of the first."""
    return _mean_delay(pairs, "ttft_s")


def mean_e2e(pairs: Pairs) -> Difference:
    """Return the mean E2E latency of the other run ÷ that of the first."""
    return _mean_delay(pairs, "e2e_s")


def _mean_delay(pairs: Pairs, name: str) -> Difference:
    clusters = pairs.clusters()
    first, other = (delays_of(columns)[name] for columns in (pairs.first, pairs.other))
    interval = positive_ratio(clusters.sums(other), clusters.sums(first))
    return Difference(_differences_verdict(interval, 1.0, np.array_equal(first, other)), interval)


def _differences_verdict(interval: Interval, no_difference: float, same: bool) -> Verdict:
    if same:
        return "same"
    if interval.low is None or interval.high is None:
        return "no interval"
    return "not shown" if interval.low <= no_difference <= interval.high else "differs"


# ------------------------------------------------------------------------------
# Tables that compare finished runs: differences per arm, and the settings that differ.
# ------------------------------------------------------------------------------

Show = Callable[[float, Ends | None], str]

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

    hits, ttft_s  token hit rate and mean TTFT of the first run and of this one: over paired
                  requests, else over all
    differences   paired differences; None where requests cannot be paired
    reason        why requests cannot be paired
    """

    arm: str
    run: str
    hits: tuple[float, float]
    ttft_s: tuple[float | None, float | None]
    differences: ArmDifferences | None
    reason: str = ""


def arms_table(
    title: str, rows: Sequence[ArmRow], several: bool, notes: Sequence[str] = ()
) -> Table:
    """Return the differences by arm; `several` adds a column that names the run."""
    fields = (
        *_names(several),
        Field("token_hit_rate_first", "hit rate,\nfirst", percent, "hits.0", 2),
        Field("token_hit_rate_run", "hit rate,\nrun", percent, "hits.1", 2),
        *_difference(
            "token_hit_rate_difference", "token hit rate,\ndifference", "token_hit_rate", _points
        ),
        Field("ttft_mean_first_s", "TTFT,\nfirst", seconds, "ttft_s.0", 3),
        Field("ttft_mean_run_s", "TTFT,\nrun", seconds, "ttft_s.1", 3),
        *_difference("ttft_ratio", "TTFT,\nratio", "ttft", ratio_text),
        *_difference("e2e_ratio", "E2E,\nratio", "e2e", ratio_text, 4),
        Field("paired_requests", "paired\nrequests", number_format(","), "differences.requests", 5),
        Field("paired_seeds", "", hidden, "differences.seeds", 5),
    )
    return tabulate("arms", title, fields, rows, (*_NOTES, *notes))


def _names(several: bool) -> tuple[Field, ...]:
    run = Field("run", "run" if several else "", word, left=True)
    return Field("arm", "arm", word, left=True), run


def _difference(name: str, heading: str, of: str, show: Show, keep: int = 0) -> tuple[Field, ...]:
    """Return fields of a difference as text, of the ends of its interval, and of its verdict."""
    return (
        Field(name, heading, lambda row: _text(row, of, show), whole, keep, left=True),
        Field(f"{name}_low", "", hidden, f"differences.{of}.interval.low"),
        Field(f"{name}_high", "", hidden, f"differences.{of}.interval.high"),
        Field(f"{of}_verdict", "", hidden, lambda row: _runs_table_verdict(row, of)),
    )


def _runs_table_verdict(row: ArmRow, of: str) -> str:
    difference: Difference | None = getattr(row.differences, of, None)
    if difference is not None:
        return difference.verdict
    return f"cannot be paired: {row.reason}" if row.reason else "saturated"


def _text(row: ArmRow, of: str, show: Show) -> Cell:
    difference: Difference | None = getattr(row.differences, of, None)
    verdict = _runs_table_verdict(row, of)
    if difference is None:
        return placeholder(verdict)
    shown = show(difference.interval.mean, difference.interval.ends)
    texts = {"same": "same", "differs": f"differs by {shown}", "not shown": f"not shown: {shown}"}
    return Cell(difference.interval.mean, texts.get(verdict, f"{shown}, no interval"))


def _points(value: float, ends: Ends | None) -> str:
    """A difference of shares in percentage points: +1.23 [1.02, 1.44] points."""
    between = "" if ends is None else f" [{100 * ends[0]:.2f}, {100 * ends[1]:.2f}]"
    return f"{100 * value:+.2f}{between} points"


def settings_table(names: Sequence[str], settings: Mapping[str, tuple[str, ...]]) -> Table:
    """Settings that differ, one column per run."""
    columns = (
        Column("setting", "setting", left=True),
        *(Column(name, name, left=True) for name in names),
    )
    rows = tuple((word(key), *map(word, values)) for key, values in settings.items())
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
    errors  median and p95 of the relative differences of single requests; None where requests
            cannot be paired
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
        Field("metric", "metric", word, left=True),
        Field("first", "first", number_format(",.4g"), "values.0"),
        Field("run_value", "run", number_format(",.4g"), "values.1"),
        Field(
            "ratio",
            "ratio",
            table.ratio,
            lambda row: row.values[1] / row.values[0] if row.values[0] else None,
        ),
        Field("error_p50", "error of\nrequests, p50", percent, "errors.0", 1),
        Field("error_p95", "error of\nrequests, p95", percent, "errors.1", 1),
    )
    return tabulate("serving", title, fields, rows, _SERVING_NOTES)


# ------------------------------------------------------------------------------
# Serving metrics of finished runs compared with the first one, such as a real server and its
# simulated run.
# ------------------------------------------------------------------------------


def compare_serving(runs: Sequence[FinishedRun]) -> Table:
    """Table of every metric that the first run and another run share, by arm, with errors of single
    requests."""
    first, *others = runs
    rows = []
    for other in others:
        for arm in [arm for arm in first.serving if arm in other.serving]:
            ours, theirs = first.serving[arm], other.serving[arm]
            errors = _errors(first, other, arm)
            for name in [name for name in ours if name in theirs]:
                means = ours[name]["mean"], theirs[name]["mean"]
                rows.append(ServingDifference(arm, other.name, name, means, errors.get(name)))
    if not rows:
        raise ValueError(f"runs={[run.name for run in runs]}: expected an arm that two runs share")
    title = f"Serving: {' and '.join(other.name for other in others)} beside {first.name}"
    return serving_differences(title, rows, several=len(others) > 1)


def _errors(first: FinishedRun, other: FinishedRun, arm: str) -> dict[str, tuple[float, float]]:
    """Median and p95 over requests of |other − first| ÷ first, by metric; empty where requests
    cannot be paired."""
    try:
        pairs = paired(first.records(arm), other.records(arm))
    except UnpairedError:
        return {}
    ours, theirs = (delays_of(columns) for columns in (pairs.first, pairs.other))
    errors = {}
    for delay, mean in (("ttft_s", "mean_ttft_ms"), ("e2e_s", "mean_e2el_ms")):
        values = ours[delay]
        positive = values > 0
        if positive.any():
            error = np.abs(theirs[delay][positive] - values[positive]) / values[positive]
            errors[mean] = (float(np.median(error)), float(np.percentile(error, 95)))
    return errors


# ------------------------------------------------------------------------------
# The entry `compare`: compare finished runs with the first one, arm by arm.
# ------------------------------------------------------------------------------

FOLDER = "compare"


@dataclass
class Compare:
    """Compare finished runs: the differences of each arm with intervals, and the settings that
    differ.

    `runs`    folders of finished studies; the others are compared with the first
    `output`  output folder of the comparison
    """

    runs: list[str] = REQUIRED
    output: OutputSettings = field(default_factory=OutputSettings)

    def __post_init__(self) -> None:
        if len(self.runs) < 2:
            raise ValueError(f"runs={self.runs}: expected two folders or more")


@entry("compare", Compare, check=lambda settings, root: compare(finished_runs(settings.runs)))
def run_compare(settings: Compare, run: str, root: Path) -> Path:
    """Compare runs, print the tables, write a run folder, and return the folder."""
    started = time.perf_counter()
    runs = finished_runs(settings.runs)
    with entry_folder(settings, FOLDER, run, root) as folder:
        tables = compare(runs)
        summary = {
            "compared": [
                {"name": other.name, "folder": str(other.folder), "commit": other.summary["commit"]}
                for other in runs
            ],
            **run_facts(time.perf_counter() - started),
        }
        write_results(summary, tables, folder.work)
        caveats = dict.fromkeys(
            f"{run.name}: {text}" for run in runs for text in run.summary["caveats"]
        )
        failed = [f"{run.name}: {text}" for run in runs for text in run.summary["failed"].values()]
        about = [
            f"{run.name}: {run.summary['workload']['detail']}, {run.summary['model']}"
            for run in runs
        ]
        config = (folder.work / CONFIG).read_text()
        page = Page(
            tables[0].title,
            tables,
            about,
            tuple(caveats),
            failed,
            config=config,
            facts=facts_of(summary),
        )
        write_page(page, folder.work)
        publish(folder, tables)
    return folder.path


def compare(runs: Sequence[FinishedRun]) -> tuple[Table, ...]:
    """Tables of arms, serving metrics and settings of each run next to the first, where all runs
    have them."""
    names = [run.name for run in runs]
    tables = [_arms(runs)] if all("arms" in run.summary for run in runs) else []
    tables += [compare_serving(runs)] if all(run.serving for run in runs) else []
    if not tables:
        raise ValueError(
            f"runs={names}: expected an analysis that all of them have, summary or serving"
        )
    return *tables, settings_table(names, differing([run.settings for run in runs]))


def _arms(runs: Sequence[FinishedRun]) -> Table:
    first, *others = runs
    rows = [
        _row(first, other, arm)
        for other in others
        for arm in first.summary["arms"]
        if arm in other.summary["arms"]
    ]
    if not rows:
        raise ValueError(f"runs={[run.name for run in runs]}: expected an arm that two runs share")
    title = f"{' and '.join(other.name for other in others)} beside {first.name}"
    arms = [set(run.summary["arms"]) for run in runs]
    unshared = {
        run.name: sorted(run_arms - set.intersection(*arms))
        for run, run_arms in zip(runs, arms, strict=True)
    }
    # paired requests may have too few seeds or groups for an interval
    sizes = dict.fromkeys(
        (row.differences.seeds, row.differences.groups) for row in rows if row.differences
    )
    notes = [note for size in sizes if (note := describe_few(*size))]
    notes += [
        f"not in every run, {name}: {', '.join(names)}" for name, names in unshared.items() if names
    ]
    return arms_table(title, rows, several=len(others) > 1, notes=notes)


def _row(first: FinishedRun, other: FinishedRun, arm: str) -> ArmRow:
    summaries = [run.summary["arms"][arm] for run in (first, other)]
    hits = (summaries[0]["token_hit_rate"], summaries[1]["token_hit_rate"])
    ttft_s = (summaries[0]["ttft_s"]["mean"], summaries[1]["ttft_s"]["mean"])
    try:
        pairs = paired(first.records(arm), other.records(arm))
    except UnpairedError as reason:
        return ArmRow(arm, other.name, hits, ttft_s, None, str(reason))
    saturated = first.saturated(arm), other.saturated(arm)
    arm_differences = differences(pairs, any(saturated))
    means_s = zip(arm_differences.ttft_means_s, saturated, strict=True)
    first_s, other_s = (None if grows else mean_s for mean_s, grows in means_s)
    return ArmRow(arm, other.name, arm_differences.hit_rates, (first_s, other_s), arm_differences)

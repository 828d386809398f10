"""The analysis `summary`: comparison of arms, with their speedups, bounds and loads."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from spanlab.analyses.base import Findings, Finished, caveats, describe_store, footer, load_words
from spanlab.records import LOSS_CAUSES
from spanlab.report import curves  # noqa: F401 - registers the figures
from spanlab.report.data import (
    ArmData,
    StudyData,
    category_tokens,
    interval_words,
    mean_ttft,
    saturated,
    token_hit_rate,
    unsettled,
)
from spanlab.report.figures import FIGURES
from spanlab.report.table import (
    Cell,
    Field,
    Table,
    byte_size,
    count,
    hidden,
    number_format,
    one_decimal,
    percent,
    percent_text,
    placeholder,
    ratio_interval,
    seconds,
    seconds_interval,
    tabulate,
    whole,
    with_ends,
    word,
)
from spanlab.settings.analyses import ANALYSES, ARMS, REPEAT, Analysis
from spanlab.study.machine import withdraw_speedups
from spanlab.study.numbers import speedup

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# ------------------------------------------------------------------------------
# Bounds on the reuse of each arm, as shares of its prompt tokens.
# ------------------------------------------------------------------------------

MEANING = (
    "infinite cache = reuse with unlimited memory, with the arm's kind of lookup; offline "
    "bound = reuse that no cache with the arm's memory and unit can exceed in this order of requests; "
    "regret = offline bound − token hit rate; TTFT − bound = mean TTFT above that of requests which never queue, are "
    "alone on the engine and compute what the best use of the memory leaves"
)


def infinite_cache(summary: dict[str, Any]) -> float | None:
    """Tokens that an infinite cache reuses with the arm's kind of lookup ÷ prompt tokens."""
    kind = "prefix" if summary["finds"] == "prefixes" else "any_position"
    return _share(summary, f"infinite_{kind}_tokens")


def offline_bound(summary: dict[str, Any]) -> float | None:
    """Tokens that no cache with the arm's memory and unit can exceed ÷ prompt tokens."""
    return _share(summary, "offline_tokens")


def ttft_regret(summary: dict[str, Any]) -> float | None:
    """Mean TTFT above the bound without queueing, in seconds; None where the queue grows."""
    seconds: float | None = summary["bounds"]["ttft_regret_s"]
    return None if saturated(summary) else seconds


def _share(summary: dict[str, Any], name: str) -> float | None:
    tokens: int | None = summary["bounds"][name]
    return None if tokens is None else tokens / (summary["tokens"]["prompt"] or 1)


# ------------------------------------------------------------------------------
# The table of a study's arms: one row per arm, in the order given.
# ------------------------------------------------------------------------------

Summary = dict[str, Any]
LOAD_NOTE = "load ÷ capacity = time that fully batched steps need for all requests ÷ time over which requests arrive"


def _mean_ttft(summary: Summary) -> Cell:
    if saturated(summary):
        return placeholder("saturated")
    cell = seconds_interval(mean_ttft(summary))
    return Cell(cell.value, f"{cell.text} †") if unsettled(summary) else cell


def _repaired(summary: Summary) -> float:
    return float(summary["tokens"]["repaired"]) / float(summary["tokens"]["prompt"] or 1)


def _fields(load: str) -> tuple[Field, ...]:
    """Return the fields of an arm's summary; `load` is the measured load, for the heading of the
    speedup."""
    unknown = (None,)
    return (
        Field("arm", "arm", word, left=True),
        Field("token_hit_rate", "token\nhit rate", percent),
        Field("token_hit_rate_low", "", hidden, lambda arm: token_hit_rate(arm).low),
        Field("token_hit_rate_high", "", hidden, lambda arm: token_hit_rate(arm).high),
        Field("share_of_bound", "of\nbound", percent, keep=3),
        Field("infinite_cache_share", "infinite\ncache", percent, infinite_cache, 5),
        Field("offline_bound_share", "offline\nbound", percent, offline_bound, 3),
        Field("offline_bound_tokens", "", hidden, "bounds.offline_tokens"),
        Field("regret_points", "regret,\npoints", one_decimal, "bounds.regret_points", 2),
        Field("least_ttft_s", "", hidden, "bounds.least_ttft_s"),
        Field("ttft_regret_s", "TTFT −\nbound", seconds, ttft_regret, 6, empty=unknown),
        Field("request_hit_rate", "request\nhit rate", percent, keep=6),
        Field("requests", "", hidden),
        Field("prompt_tokens", "", hidden, "tokens.prompt"),
        Field("reused_tokens", "reused\ntokens", count, "tokens.reused", 7),
        Field("computed_tokens", "computed\ntokens", count, "tokens.computed", 8),
        Field("repaired_share", "repaired\ntokens", percent, _repaired, 3, empty=(0,)),
        Field("repaired_tokens", "", hidden, "tokens.repaired"),
        Field("ttft_mean_s", "TTFT\nmean", _mean_ttft, whole),
        Field("ttft_mean_low_s", "", hidden, lambda arm: mean_ttft(arm).low),
        Field("ttft_mean_high_s", "", hidden, lambda arm: mean_ttft(arm).high),
        Field("verdict", "", hidden, "stationarity.verdict"),
        Field("ttft_p50_s", "TTFT\np50", seconds, "ttft_s.p50", 9),
        Field("ttft_p95_s", "TTFT\np95", seconds, "ttft_s.p95", 10, empty=unknown),
        Field("ttft_p99_s", "TTFT\np99", seconds, "ttft_s.p99", 4, empty=unknown),
        *with_ends(
            Field(
                "speedup_of_ttft",
                f"speedup\nat {load}" if load else "speedup\nof TTFT",
                ratio_interval,
                lambda arm: arm.get("speedup"),
                2,
                empty=unknown,
            )
        ),
        Field("utilisation", "load ÷\ncapacity", percent, keep=5, empty=unknown),
        Field(
            "kv_and_copies_mean_bytes",
            "KV\nresident",
            byte_size,
            lambda arm: float(arm["bytes"]["kv_resident_mean"] + arm["bytes"]["copied_mean"]),
            5,
        ),
        Field("kv_resident_mean_bytes", "", hidden, "bytes.kv_resident_mean"),
        Field(
            "state_resident_mean_bytes",
            "states\nresident",
            byte_size,
            "bytes.state_resident_mean",
            5,
        ),
    )


def arms_table(study: StudyData) -> Table:
    """Return the arms of a study, failed arms last; provenance is in the title, definitions are in
    the notes."""
    fields = _fields(study.load_words)
    title = f"{study.title} · store: {study.store}\n{study.footer}"
    rows = [{"arm": arm.name, **arm.summary} for arm in study.arms]
    measured = tabulate("arms", title, fields, rows, _notes(study))
    empty = [placeholder("failed"), *[placeholder("")] * (len(fields) - 2)]
    return replace(
        measured, rows=(*measured.rows, *((word(name), *empty) for name in study.failed))
    )


def _notes(study: StudyData) -> list[str]:
    """Return definitions of the columns, caveats of the study, and reasons of failed arms."""
    bound = "tokens an infinite cache could reuse"
    if len({arm.summary["finds"] for arm in study.arms}) > 1:
        bound += ", wherever their spans stand"
    notes = [
        f"token hit rate = reused ÷ prompt tokens; of bound = reused ÷ {bound}; "
        f"request hit rate = requests with at least one {study.count_hit_as} token ÷ requests",
        f"TTFT = first token − arrival, queueing included; speedup = mean TTFT of {study.baseline} ÷ mean TTFT of the "
        "arm on the same requests: with queueing it depends on the load; resident = mean over time",
    ]
    if study.arms:
        counts = sorted({arm.summary["requests"] for arm in study.arms})
        requests = f"{counts[0]:,}" if len(counts) < 2 else f"{counts[0]:,} to {counts[-1]:,}"
        sample = f"percentiles of {requests} requests, all seeds together; p99 needs 1,000 of them, p95 200"
        notes.append(f"{interval_words(study.arms)}; {sample}")
    notes.append(MEANING)
    if any(arm.summary["utilisation"] is not None for arm in study.arms):
        notes.append(LOAD_NOTE)
    if any(unsettled(arm.summary) for arm in study.arms):
        notes.append("† not a steady state")
    if any(_repaired(arm.summary) for arm in study.arms):
        notes.append(
            "repaired tokens = computed by a repair, with attention to the whole prompt ÷ prompt tokens"
        )
    if any(arm.summary["bytes"]["copied_mean"] for arm in study.arms):
        notes.append("KV resident = cached KV, and private copies of running requests")
    return [*notes, *study.notes, *study.caveats, *study.failed.values()]


# ------------------------------------------------------------------------------
# Every table of a study: arms, causes of tokens that were not reused, delays by load.
# ------------------------------------------------------------------------------

_CAUSE_NOTE = "reused and the causes sum to the prompt tokens of each arm"
_LOAD_NOTE = (
    f"TTFT = first token − arrival; queue = admission − arrival; {LOAD_NOTE}; a saturated arm has no steady-state "
    "delays"
)

_LOAD_FIELDS = (
    Field("arm", "arm", word, left=True),
    Field("rate_rps", "requests/s", number_format("g")),
    Field("requests", "requests", number_format(","), keep=3),
    Field("seeds", "seeds", number_format("d"), keep=3),
    Field("verdict", "state", word, "state.verdict", 1, left=True),
    Field("utilisation", "load ÷\ncapacity", percent, keep=1),
    Field("busy_share", "time\nbusy", percent, "busy_fraction", 2),
    *with_ends(
        Field("queue_mean_s", "queue\nmean", seconds_interval, "queue_s"), "queue_mean_{}_s"
    ),
    Field("queue_p99_s", "queue\np99", seconds, "queue_s.p99", 2),
    *with_ends(Field("ttft_mean_s", "TTFT\nmean", seconds_interval, "ttft_s"), "ttft_mean_{}_s"),
    Field("ttft_p99_s", "TTFT\np99", seconds, "ttft_s.p99", 2),
)


def study_tables(study: StudyData) -> tuple[Table, ...]:
    """Return the tables of a study, arms first; the table of loads only where the study has load
    points."""
    loads = (load_table(study),) if study.load else ()
    return arms_table(study), losses_table(study), *loads


def losses_table(study: StudyData) -> Table:
    """Return the prompt tokens of each arm: reused, or computed by cause; causes that no arm has
    are hidden."""
    categories = ("reused", *LOSS_CAUSES)
    fields = (
        Field("arm", "arm", word, "name", left=True),
        Field("prompt_tokens", "prompt\ntokens", count, "summary.tokens.prompt"),
        *(_category(study, category) for category in categories),
    )
    return tabulate(
        "losses", f"Prompt tokens by cause · {study.title}", fields, study.arms, (_CAUSE_NOTE,)
    )


def _category(study: StudyData, category: str) -> Field:
    """Return the field of one category of tokens, by the name that it has in a record."""

    def tokens(arm: ArmData) -> Cell:
        number = category_tokens(arm.summary["tokens"], category)
        return Cell(number, percent_text(number / (arm.summary["tokens"]["prompt"] or 1)))

    if category == "reused":
        return Field("reused_tokens", "reused", tokens, whole)
    occurs = any(category_tokens(arm.summary["tokens"], category) for arm in study.arms)
    # a heading in two lines: `state_never_placed` as state / never placed
    first, _, remainder = category.replace("kv_", "KV_").partition("_")
    heading = f"{first}\n{remainder.replace('_', ' ')}".strip()
    return Field(f"lost_{category}", heading if occurs else "", tokens, whole)


def load_table(study: StudyData) -> Table:
    """Delays of every arm at every offered load."""
    return tabulate(
        "load", f"Delays by offered load · {study.title}", _LOAD_FIELDS, study.load, (_LOAD_NOTE,)
    )


def summarise_arms(finished: Finished) -> Findings:
    """Return every arm's summary, with speedups over the baseline unless the machine was noisy."""
    study, results = finished.study, finished.results
    baseline = next((result for result in results if result.data.name == study.runs.baseline), None)
    bound = max(result.bound for result in results)
    for result in results:
        values = result.data.summary
        values["own_bound_tokens"] = result.bound
        values["bound_tokens"] = bound
        values["share_of_bound"] = values["tokens"]["reused"] / bound if bound else None
        # where a queue grows, the ratio depends on the run's length
        if baseline is None or baseline.saturated or result.saturated:
            values["speedup"] = None
        else:
            values["speedup"] = speedup(baseline.ttft_sums, result.ttft_sums)
    arms = [result.data for result in results]
    data = StudyData(
        title=finished.name,
        footer=footer(finished),
        arms=arms,
        load=[point for result in results for point in result.load],
        store=describe_store(study),
        baseline=study.runs.baseline,
        count_hit_as=study.runs.count_hit_as,
        caveats=(*finished.workload.notes, *caveats(study, arms, finished.failed)),
        failed=finished.failed,
        load_words=load_words(study),
    )
    if finished.noise is not None:
        data = withdraw_speedups(data, finished.noise)
    tables = study_tables(data)
    return Findings(
        summary={
            "intervals": interval_words(data.arms),
            "arms": {arm.name: arm.summary for arm in data.arms},
            "load": [asdict(point) for point in data.load],
        },
        tables=tables[:1],
        further=tables[1:],
        figures={name: partial(_draw, name, data) for name in FIGURES},
        caveats=data.caveats,
    )


def _draw(name: str, data: StudyData) -> Figure | None:
    return FIGURES[name](data)


ANALYSES.add(Analysis("summary", summarise_arms, needs=(ARMS, REPEAT)))

"""The table of a study's arms: one row per arm, in the order given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spanlab.report import cells
from spanlab.report.data import ArmData, StudyData
from spanlab.report.measures import interval, interval_words, saturated, unsettled
from spanlab.report.summary import bounds
from spanlab.report.tables import Cell, Column, Table

Summary = dict[str, Any]


@dataclass(frozen=True)
class Measure:
    """One column and its cell of an arm's summary.

    optional  the column is hidden where no arm has a value
    """

    column: Column
    cell: Callable[[Summary], Cell]
    optional: bool = False

    @staticmethod
    def hidden(name: str, value: Callable[[Summary], Any]) -> Measure:
        """A column that only CSV and the tracker have."""
        return Measure(Column(name, ""), lambda summary: cells.hidden(value(summary)))


def _mean_ttft(summary: Summary) -> Cell:
    if saturated(summary):
        return cells.placeholder("saturated")
    cell = cells.seconds(summary["ttft_s"]["mean"], interval(summary["ttft_s_interval"]["mean"]))
    return Cell(cell.value, f"{cell.text} †") if unsettled(summary) else cell


def _end(name: str, number: int) -> Callable[[Summary], float | None]:
    """Return a function that reads one end of an interval of a summary: 0 the lower, 1 the upper."""

    def end(summary: Summary) -> float | None:
        low_high = summary[name]["mean"] if isinstance(summary[name], dict) else summary[name]
        ends = interval(low_high)
        return None if ends is None else ends[number]

    return end


def _speedup(summary: Summary) -> Cell:
    speedup = summary.get("speedup") or {}
    return cells.ratio(speedup.get("mean"), interval((speedup.get("low"), speedup.get("high"))))


def _speedup_part(name: str) -> Callable[[Summary], float | None]:
    return lambda summary: (summary.get("speedup") or {}).get(name)


def _repaired(summary: Summary) -> float:
    return float(summary["tokens"]["repaired"]) / float(summary["tokens"]["prompt"] or 1)


def _resident(summary: Summary) -> float:
    return float(summary["bytes"]["kv_resident_mean"] + summary["bytes"]["copied_mean"])


_SPEEDUP = "speedup_of_ttft"
_REPAIRED = "repaired_share"

MEASURES = (
    Measure(Column("token_hit_rate", "token\nhit rate"), lambda s: cells.percent(s["token_hit_rate"])),
    Measure.hidden("token_hit_rate_low", _end("token_hit_rate_interval", 0)),
    Measure.hidden("token_hit_rate_high", _end("token_hit_rate_interval", 1)),
    Measure(Column("share_of_bound", "of\nbound", 3), lambda s: cells.percent(s["share_of_bound"])),
    Measure(Column("infinite_cache_share", "infinite\ncache", 5), bounds.infinite_cache),
    Measure(Column("offline_bound_share", "offline\nbound", 3), bounds.offline_bound),
    Measure.hidden("offline_bound_tokens", lambda s: s["bounds"]["offline_tokens"]),
    Measure(Column("regret_points", "regret,\npoints", 2), bounds.regret),
    Measure.hidden("least_ttft_s", lambda s: s["bounds"]["least_ttft_s"]),
    Measure(Column("ttft_regret_s", "TTFT −\nbound", 6), bounds.ttft_regret, optional=True),
    Measure(Column("request_hit_rate", "request\nhit rate", 6), lambda s: cells.percent(s["request_hit_rate"])),
    Measure.hidden("requests", lambda s: s["requests"]),
    Measure.hidden("prompt_tokens", lambda s: s["tokens"]["prompt"]),
    Measure(Column("reused_tokens", "reused\ntokens", 7), lambda s: cells.count(s["tokens"]["reused"])),
    Measure(Column("computed_tokens", "computed\ntokens", 8), lambda s: cells.count(s["tokens"]["computed"])),
    Measure(Column(_REPAIRED, "repaired\ntokens", 3), lambda s: cells.percent(_repaired(s))),
    Measure.hidden("repaired_tokens", lambda s: s["tokens"]["repaired"]),
    Measure(Column("ttft_mean_s", "TTFT\nmean"), _mean_ttft),
    Measure.hidden("ttft_mean_low_s", _end("ttft_s_interval", 0)),
    Measure.hidden("ttft_mean_high_s", _end("ttft_s_interval", 1)),
    Measure.hidden("verdict", lambda s: s["stationarity"]["verdict"]),
    Measure(Column("ttft_p50_s", "TTFT\np50", 9), lambda s: cells.seconds(s["ttft_s"]["p50"])),
    Measure(Column("ttft_p95_s", "TTFT\np95", 10), lambda s: cells.seconds(s["ttft_s"]["p95"]), optional=True),
    Measure(Column("ttft_p99_s", "TTFT\np99", 4), lambda s: cells.seconds(s["ttft_s"]["p99"]), optional=True),
    Measure(Column(_SPEEDUP, "speedup\nof TTFT", 2), _speedup, optional=True),
    Measure.hidden("speedup_of_ttft_low", _speedup_part("low")),
    Measure.hidden("speedup_of_ttft_high", _speedup_part("high")),
    Measure(Column("utilisation", "load ÷\ncapacity", 5), lambda s: cells.percent(s["utilisation"]), optional=True),
    Measure(Column("kv_and_copies_mean_bytes", "KV\nresident", 5), lambda s: cells.byte_size(_resident(s))),
    Measure.hidden("kv_resident_mean_bytes", lambda s: s["bytes"]["kv_resident_mean"]),
    Measure(
        Column("state_resident_mean_bytes", "states\nresident", 5),
        lambda s: cells.byte_size(s["bytes"]["state_resident_mean"]),
    ),
)


def arms_table(study: StudyData) -> Table:
    """Return the arms of a study, failed arms last; provenance is in the title, definitions are in the notes."""
    summaries = [arm.summary for arm in study.arms]
    columns = [Column("arm", "arm", left=True), *(_column(measure, study, summaries) for measure in MEASURES)]
    rows = [(cells.word(arm.name), *(measure.cell(arm.summary) for measure in MEASURES)) for arm in study.arms]
    empty = [cells.placeholder("")] * (len(MEASURES) - 1)
    rows += [(cells.word(name), cells.placeholder("failed"), *empty) for name in study.failed]
    title = f"{study.title} · store: {study.store}\n{study.footer}"
    return Table("arms", title, tuple(columns), tuple(rows), tuple(_notes(study)))


def _column(measure: Measure, study: StudyData, summaries: Sequence[Summary]) -> Column:
    """Return the column for this study: hidden if empty, and with the measured load in the heading of the speedup."""
    column = measure.column
    empty = measure.optional and summaries and all(measure.cell(summary).value is None for summary in summaries)
    if empty or (column.name == _REPAIRED and not any(map(_repaired, summaries))):
        return replace(column, heading="")
    if column.name == _SPEEDUP and study.load_words:
        return replace(column, heading=f"speedup\nat {study.load_words}")
    return column


def _sample_text(arms: Sequence[ArmData]) -> str:
    counts = sorted({arm.summary["requests"] for arm in arms})
    range_text = f"{counts[0]:,}" if len(counts) < 2 else f"{counts[0]:,} to {counts[-1]:,}"
    return f"percentiles of {range_text} requests, all seeds together; p99 needs 1,000 of them, p95 200"


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
        f"{interval_words(study.arms)}; {_sample_text(study.arms)}" if study.arms else "",
        bounds.MEANING,
    ]
    if any(arm.summary["utilisation"] is not None for arm in study.arms):
        notes.append(
            "load ÷ capacity = time that fully batched steps need for the offered work ÷ time in which it comes"
        )
    if any(unsettled(arm.summary) for arm in study.arms):
        notes.append("† not a steady state")
    if any(_repaired(arm.summary) for arm in study.arms):
        notes.append("repaired tokens = computed by a repair, with attention to the whole prompt ÷ prompt tokens")
    if any(arm.summary["bytes"]["copied_mean"] for arm in study.arms):
        notes.append("KV resident = cached KV, and private copies of running requests")
    notes = [note for note in notes if note]
    return [*notes, *study.notes, *study.caveats, *study.failed.values()]

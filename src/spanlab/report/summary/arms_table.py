"""The table of a study's arms: one row per arm, in the order given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from spanlab.report import cells
from spanlab.report.data import ArmData, StudyData
from spanlab.report.fields import Field, tabulate, whole, with_ends
from spanlab.report.measures import interval_words, mean_ttft, saturated, token_hit_rate, unsettled
from spanlab.report.summary import bounds
from spanlab.report.tables import Cell, Table

Summary = dict[str, Any]
LOAD_NOTE = "load ÷ capacity = time that fully batched steps need for all requests ÷ time over which requests arrive"


def _mean_ttft(summary: Summary) -> Cell:
    if saturated(summary):
        return cells.placeholder("saturated")
    cell = cells.seconds_interval(mean_ttft(summary))
    return Cell(cell.value, f"{cell.text} †") if unsettled(summary) else cell


def _repaired(summary: Summary) -> float:
    return float(summary["tokens"]["repaired"]) / float(summary["tokens"]["prompt"] or 1)


def _resident(summary: Summary) -> float:
    return float(summary["bytes"]["kv_resident_mean"] + summary["bytes"]["copied_mean"])


def _fields(load: str) -> tuple[Field, ...]:
    """Return the fields of an arm's summary; `load` is the measured load, for the heading of the speedup."""
    unknown = (None,)
    return (
        Field("arm", "arm", cells.word, left=True),
        Field("token_hit_rate", "token\nhit rate", cells.percent),
        Field("token_hit_rate_low", "", cells.hidden, lambda arm: token_hit_rate(arm).low),
        Field("token_hit_rate_high", "", cells.hidden, lambda arm: token_hit_rate(arm).high),
        Field("share_of_bound", "of\nbound", cells.percent, keep=3),
        Field("infinite_cache_share", "infinite\ncache", cells.percent, bounds.infinite_cache, 5),
        Field("offline_bound_share", "offline\nbound", cells.percent, bounds.offline_bound, 3),
        Field("offline_bound_tokens", "", cells.hidden, "bounds.offline_tokens"),
        Field("regret_points", "regret,\npoints", cells.one_decimal, "bounds.regret_points", 2),
        Field("least_ttft_s", "", cells.hidden, "bounds.least_ttft_s"),
        Field("ttft_regret_s", "TTFT −\nbound", cells.seconds, bounds.ttft_regret, 6, empty=unknown),
        Field("request_hit_rate", "request\nhit rate", cells.percent, keep=6),
        Field("requests", "", cells.hidden),
        Field("prompt_tokens", "", cells.hidden, "tokens.prompt"),
        Field("reused_tokens", "reused\ntokens", cells.count, "tokens.reused", 7),
        Field("computed_tokens", "computed\ntokens", cells.count, "tokens.computed", 8),
        Field("repaired_share", "repaired\ntokens", cells.percent, _repaired, 3, empty=(0,)),
        Field("repaired_tokens", "", cells.hidden, "tokens.repaired"),
        Field("ttft_mean_s", "TTFT\nmean", _mean_ttft, whole),
        Field("ttft_mean_low_s", "", cells.hidden, lambda arm: mean_ttft(arm).low),
        Field("ttft_mean_high_s", "", cells.hidden, lambda arm: mean_ttft(arm).high),
        Field("verdict", "", cells.hidden, "stationarity.verdict"),
        Field("ttft_p50_s", "TTFT\np50", cells.seconds, "ttft_s.p50", 9),
        Field("ttft_p95_s", "TTFT\np95", cells.seconds, "ttft_s.p95", 10, empty=unknown),
        Field("ttft_p99_s", "TTFT\np99", cells.seconds, "ttft_s.p99", 4, empty=unknown),
        *with_ends(
            Field(
                "speedup_of_ttft",
                f"speedup\nat {load}" if load else "speedup\nof TTFT",
                cells.ratio_interval,
                lambda arm: arm.get("speedup"),
                2,
                empty=unknown,
            )
        ),
        Field("utilisation", "load ÷\ncapacity", cells.percent, keep=5, empty=unknown),
        Field("kv_and_copies_mean_bytes", "KV\nresident", cells.byte_size, _resident, 5),
        Field("kv_resident_mean_bytes", "", cells.hidden, "bytes.kv_resident_mean"),
        Field("state_resident_mean_bytes", "states\nresident", cells.byte_size, "bytes.state_resident_mean", 5),
    )


def arms_table(study: StudyData) -> Table:
    """Return the arms of a study, failed arms last; provenance is in the title, definitions are in the notes."""
    fields = _fields(study.load_words)
    title = f"{study.title} · store: {study.store}\n{study.footer}"
    rows = [{"arm": arm.name, **arm.summary} for arm in study.arms]
    measured = tabulate("arms", title, fields, rows, _notes(study))
    empty = [cells.placeholder("failed"), *[cells.placeholder("")] * (len(fields) - 2)]
    return replace(measured, rows=(*measured.rows, *((cells.word(name), *empty) for name in study.failed)))


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
        notes.append(LOAD_NOTE)
    if any(unsettled(arm.summary) for arm in study.arms):
        notes.append("† not a steady state")
    if any(_repaired(arm.summary) for arm in study.arms):
        notes.append("repaired tokens = computed by a repair, with attention to the whole prompt ÷ prompt tokens")
    if any(arm.summary["bytes"]["copied_mean"] for arm in study.arms):
        notes.append("KV resident = cached KV, and private copies of running requests")
    notes = [note for note in notes if note]
    return [*notes, *study.notes, *study.caveats, *study.failed.values()]

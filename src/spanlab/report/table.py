"""The study as a table for the terminal."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from spanlab.report import bounds, units
from spanlab.report.data import ArmData, StudyData
from spanlab.report.measures import interval, interval_words, saturated, unsettled

DEFAULT_WIDTH = 160
_GAP = 3  # padding, and the blank where the box would draw a line

Summary = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One column: its heading (two lines at most), its text for an arm, and how soon a narrow terminal drops it."""

    heading: str
    text: Callable[[Summary], str]
    keep: int  # the lower, the longer it stays; 0 always stays


def _mean_ttft(summary: Summary) -> str:
    if saturated(summary):
        return "saturated"
    text = units.seconds(summary["ttft_s"]["mean"], interval(summary["ttft_s_interval"]["mean"]))
    return f"{text} †" if unsettled(summary) else text


def _speedup(summary: Summary) -> str:
    speedup = summary.get("speedup") or {}
    return units.ratio(speedup.get("mean"), interval((speedup.get("low"), speedup.get("high"))))


def _repaired(summary: Summary) -> float:
    return float(summary["tokens"]["repaired"]) / float(summary["tokens"]["prompt"] or 1)


SPEEDUP = "speedup\nof TTFT"

COLUMNS = (
    Column("token\nhit rate", lambda s: units.percent(s["token_hit_rate"]), 1),
    Column("of\nbound", lambda s: units.percent(s["share_of_bound"]), 3),
    Column("infinite\ncache", bounds.infinite_cache, 5),
    Column("offline\nbound", bounds.offline_bound, 3),
    Column("regret,\npoints", bounds.regret, 2),
    Column("request\nhit rate", lambda s: units.percent(s["request_hit_rate"]), 6),
    Column("reused\ntokens", lambda s: units.count(s["tokens"]["reused"]), 7),
    Column("computed\ntokens", lambda s: units.count(s["tokens"]["computed"]), 8),
    Column("repaired\ntokens", lambda s: units.percent(_repaired(s)), 3),
    Column("TTFT\nmean", _mean_ttft, 1),
    Column("TTFT\np50", lambda s: units.seconds(s["ttft_s"]["p50"]), 9),
    Column("TTFT\np95", lambda s: units.seconds(s["ttft_s"]["p95"]), 10),
    Column("TTFT\np99", lambda s: units.seconds(s["ttft_s"]["p99"]), 4),
    Column(SPEEDUP, _speedup, 2),
    Column("load ÷\ncapacity", lambda s: units.percent(s["utilisation"]), 5),
    Column("KV\nresident", lambda s: units.byte_size(s["bytes"]["kv_resident_mean"] + s["bytes"]["copied_mean"]), 5),
    Column("states\nresident", lambda s: units.byte_size(s["bytes"]["state_resident_mean"]), 5),
)


def as_table(study: StudyData, width: int = DEFAULT_WIDTH) -> Group:
    """The study as a rich renderable: provenance, one row per arm in the order given, definitions."""
    name_width, columns = _fitting(study, width)
    table = Table(box=SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("arm", no_wrap=True, overflow="ellipsis", max_width=name_width, style="bold")
    for column in columns:
        table.add_column(_heading(column, study), justify="right", no_wrap=True)
    for arm in study.arms:
        table.add_row(Text(arm.name), *(column.text(arm.summary) for column in columns))
    for name in study.failed:
        table.add_row(Text(name), "failed")
    head = Text(f"{study.title} · store: {study.store}\n{study.footer}")
    return Group(head, Text(), table, Text(), Text(_notes(study, columns), style="dim"))


def as_text(study: StudyData, width: int = DEFAULT_WIDTH) -> str:
    """The table as plain text, no line longer than `width`."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(as_table(study, width))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def print_table(study: StudyData, console: Console | None = None) -> None:
    """Print the table, as wide as the terminal allows."""
    console = console or Console()
    console.print(as_table(study, console.width))


def _fitting(study: StudyData, width: int) -> tuple[int, list[Column]]:
    kept = _columns(study.arms)
    widths = {column: _column_width(column, study) for column in kept}
    name = max(map(len, ["arm", *(arm.name for arm in study.arms), *study.failed]))
    while kept and name + sum(_GAP + widths[column] for column in kept) > width:
        last = max(column.keep for column in kept)
        if last <= 1:
            break
        kept = [column for column in kept if column.keep != last]
    room = width - sum(_GAP + widths[column] for column in kept)
    return max(min(name, room), 4), kept


def _columns(arms: Sequence[ArmData]) -> list[Column]:
    """All columns but those of repairs, of utilisation and of percentiles that no arm has."""
    texts = {column: {column.text(arm.summary) for arm in arms} for column in COLUMNS}
    optional = [column for column in COLUMNS if arms and column.heading in _OPTIONAL]
    empty = {column for column in optional if texts[column] <= {units.MISSING}}
    repairs = any(_repaired(arm.summary) for arm in arms)
    return [
        column for column in COLUMNS if column not in empty and (repairs or not column.heading.startswith("repaired"))
    ]


_OPTIONAL = ("TTFT\np95", "TTFT\np99", "load ÷\ncapacity", SPEEDUP)


def _heading(column: Column, study: StudyData) -> str:
    """The heading; a speedup stands beside the load at which it was measured."""
    at = f"speedup\nat {study.load_words}"
    return at if column.heading == SPEEDUP and study.load_words else column.heading


def _column_width(column: Column, study: StudyData) -> int:
    texts = [*_heading(column, study).split("\n"), *(column.text(arm.summary) for arm in study.arms)]
    return max(map(len, texts))


def _sample_words(arms: Sequence[ArmData]) -> str:
    counts = sorted({arm.summary["requests"] for arm in arms})
    asked = f"{counts[0]:,}" if len(counts) < 2 else f"{counts[0]:,} to {counts[-1]:,}"
    return f"percentiles of {asked} requests, all seeds together; p99 needs 1,000 of them, p95 200"


def _notes(study: StudyData, columns: Sequence[Column]) -> str:
    """What the columns mean in this study, what its reader must know, and which columns had no room."""
    dropped = [_heading(column, study).replace("\n", " ") for column in _columns(study.arms) if column not in columns]
    bound = "tokens an infinite cache could reuse"
    if len({arm.summary["finds"] for arm in study.arms}) > 1:
        bound += ", wherever their spans stand"
    notes = [
        f"token hit rate = reused ÷ prompt tokens; of bound = reused ÷ {bound}; "
        f"request hit rate = requests with at least one {study.hit} token ÷ requests",
        f"TTFT = first token − arrival, queueing included; speedup = mean TTFT of {study.baseline} ÷ mean TTFT of the "
        "arm on the same requests: with queueing it depends on the load; resident = mean over time",
        f"{interval_words(study.arms)}; {_sample_words(study.arms)}" if study.arms else "",
    ]
    notes.append(bounds.MEANING)
    notes = [note for note in notes if note]
    if any(arm.summary["utilisation"] is not None for arm in study.arms):
        notes.append(
            "load ÷ capacity = time that fully batched steps need for the offered work ÷ time in which it comes"
        )
    if any(unsettled(arm.summary) for arm in study.arms):
        notes.append("† not a steady state")
    if any(_repaired(arm.summary) for arm in study.arms):
        notes.append("repaired tokens = computed in full view of the prompt, most a second time ÷ prompt tokens")
    if any(arm.summary["bytes"]["copied_mean"] for arm in study.arms):
        notes.append("KV resident = cached, and copied by running requests for themselves")
    notes += [*study.notes, *study.caveats, *study.failed.values()]
    return "\n".join([*notes, *([f"too narrow for: {', '.join(dropped)}"] if dropped else [])])

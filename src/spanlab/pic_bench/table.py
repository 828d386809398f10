"""The benchmark as a table for the terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from spanlab.report import units

Entry = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A heading of two lines, the text of an entry, and the output that asks for it; empty: always there."""

    heading: str
    text: Callable[[Entry], str]
    output: str = ""


def _times(kind: str, point: str) -> Callable[[Entry], str]:
    return lambda entry: units.seconds((entry[f"{kind}_ttft_s"] or {}).get(point))


def _range(entry: Entry) -> str:
    found = entry["warm_ttft_s"]
    return f"{units.seconds(found['p25'])} to {units.seconds(found['p75'])}"


COLUMNS = (
    Column("prompt\ntokens", lambda entry: units.count(entry["prompt_tokens"])),
    Column("token\nhit rate", lambda entry: units.percent(entry["token_hit_rate"]), "hit_rate"),
    Column("computed\ntokens", lambda entry: units.count(entry["computed_tokens"]), "hit_rate"),
    Column("repaired\ntokens", lambda entry: units.count(entry["repaired_tokens"]), "hit_rate"),
    Column("cold TTFT\np50", _times("cold", "p50"), "latency"),
    Column("warm TTFT\np50", _times("warm", "p50"), "latency"),
    Column("warm TTFT\nquartiles", _range, "iqr"),
    Column("its\nbound", lambda entry: units.seconds(entry["bound_s"]), "latency"),
    Column("of the\nbound", lambda entry: units.percent(entry["of_bound"]), "latency"),
    Column("speedup\nof TTFT", lambda entry: units.ratio(entry["speedup"]["p50"]), "speedup"),
    Column("ratio of\nbounds", lambda entry: units.ratio(entry["bound_speedup"]), "speedup"),
    Column("prepare", lambda entry: units.seconds((entry.get("prepare_s") or {}).get("p50")), "prepare"),
)

_NOTES = (
    "TTFT = first token − admission; cold = the first request, of an empty cache; warm = the same documents again; "
    "token hit rate = reused ÷ prompt tokens of warm requests",
    "bound = the slower of FLOPs ÷ measured matrix rate and bytes ÷ measured copy rate, for what the request really "
    "computed; speedup = TTFT of {baseline} on the same documents ÷ TTFT of the arm, paired, median; "
    "ratio of bounds = the same of what they were bound by, which bounds no speedup: a slow baseline exceeds it",
)


def as_table(entries: list[Entry], outputs: set[str], baseline: str) -> Group:
    """A rich renderable: one row per model, size and arm, and definitions."""
    columns = [column for column in COLUMNS if not column.output or column.output in outputs]
    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    for heading in ("model", "size", "arm", "order"):
        table.add_column(heading, no_wrap=True, style="bold" if heading == "arm" else "")
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True)
    before = None
    for entry in entries:
        place = (entry["model"], entry["size"])
        if before not in (None, place):
            table.add_section()
        names = (*(place if place != before else ("", "")), entry["arm"], entry["order"])
        table.add_row(*map(Text, names), *(column.text(entry) for column in columns))
        before = place
    notes = Text("\n".join(_NOTES).format(baseline=baseline), style="dim")
    return Group(table, Text(), notes)

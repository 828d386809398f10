"""The benchmark as tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from spanlab.report import units

Entry = dict[str, Any]
Columns = Sequence[tuple[str, Callable[[Entry], str]]]

CAPTURES: Columns = (
    ("states", lambda entry: f"{entry['states']}"),
    ("cold\nprefill p50", lambda entry: units.seconds(entry["cold_s"]["p50"])),
    ("without\ncaptures", lambda entry: units.seconds(entry["bare_s"]["p50"])),
    ("capture\noverhead", lambda entry: units.percent(entry["overhead"]["p50"])),
    ("\nquartiles", lambda entry: _range(entry["overhead"], units.percent)),
    ("copying\nalone", lambda entry: units.percent(entry["floor"])),
    ("KV", lambda entry: units.byte_size(entry["kv_bytes"])),
    ("states", lambda entry: units.byte_size(entry["state_bytes"])),
)
AGAIN: Columns = (
    ("shared\ntokens", lambda entry: f"{entry['shared']:,}"),
    ("visit", lambda entry: f"{entry['visit'] + 1}"),
    ("starts\nfrom", lambda entry: f"{entry['resume']:,}"),
    ("prefill\np50", lambda entry: units.seconds(entry["ttft_s"]["p50"])),
    ("\nquartiles", lambda entry: _range(entry["ttft_s"], units.seconds)),
    ("its\nbound", lambda entry: units.seconds(entry["bound_s"])),
    ("of the\nbound", lambda entry: units.percent(entry["of_bound"])),
    ("simulator's\nroofline", lambda entry: units.seconds(entry["modelled_s"])),
    ("state\nload", lambda entry: units.seconds(entry["load_s"]) if entry["resume"] else units.MISSING),
    ("speedup", lambda entry: units.ratio(entry["speedup"]["p50"])),
    ("ratio of\nbounds", lambda entry: units.ratio(entry["bound_speedup"])),
    ("logits\napart", lambda entry: f"{entry['logit_gap']:.1e}"),
)

_NOTES = (
    "capture overhead = cold prefill with the arm's captures ÷ {baseline}'s beside it − 1, paired; copying alone = "
    "state bytes, read and written ÷ measured copy rate ÷ cold prefill",
    "bytes: equal by the policy's account, in the pools' tensors and by the model's sizes; prefill = first token − "
    "admission; visit 2 = the same depth once more",
    "bound = the slower of FLOPs ÷ measured matrix rate and bytes ÷ measured copy rate; simulator's roofline = the "
    "same for hardware {hardware}",
    "speedup = {baseline} beside it ÷ the arm, paired, median; ratio of bounds = the same of what they were bound by",
    "logits apart = largest |difference| to a full prefill of the same prompt, of logits up to {scale}",
)


def as_tables(summary: dict[str, Any], baseline: str, hardware: str) -> Group:
    """Rich renderables: what captures cost, what checkpoints save, the goal, and definitions."""
    scale = max((entry["logit_scale"] for entry in summary["again"]), default=0.0)
    notes = "\n".join(_NOTES).format(baseline=baseline, hardware=hardware, scale=units.significant(scale))
    goals = Text("\n".join([*map(noise_line, summary["noise"]), *map(goal_line, summary["goal"])]))
    again = last_visits(summary["again"])
    tables = _table(summary["captures"], CAPTURES), Text(), _table(again, columns_of(again))
    return Group(*tables, Text(), goals, Text(), Text(notes, style="dim"))


def columns_of(again: Sequence[Entry]) -> Columns:
    """Columns of what checkpoints save; a noisy machine's speedups are withheld."""
    measured = any(entry["speedup"] for entry in again)
    return tuple(column for column in AGAIN if measured or column[0] != "speedup")


def last_visits(entries: Sequence[Entry]) -> list[Entry]:
    """One entry per arm and depth, but for those that started elsewhere on an earlier visit."""
    kept: dict[tuple[Any, ...], Entry] = {}
    for entry in entries:
        kept[tuple(entry[key] for key in ("model", "length", "arm", "shared", "resume"))] = entry
    return list(kept.values())


def goal_line(goal: Entry) -> str:
    """The goal and what was measured, in one line."""
    head = f"{goal['model']}: captures of at most {goal['states']} states may cost {units.percent(goal['most'])}"
    if goal["overhead"] is None:
        return f"{head}; no arm has so few"
    verdict = "met" if goal["met"] else "not met"
    worst = f"{goal['arm']} at {goal['length']:,} tokens, {units.percent(goal['overhead'])}"
    return f"{head}; dearest: {worst}: {verdict}"


def noise_line(noise: Entry) -> str:
    """What two equal cold prefills differ by, in one line."""
    place = f"{noise['model']}, {noise['length']:,} tokens"
    head = f"{place}: a cold prefill without captures takes {units.seconds(noise['bare_s']['p50'])}"
    return f"{head}; one differs from the next by {units.percent(noise['apart']['p50'])} in the median"


def _table(entries: Sequence[Entry], columns: Columns) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    for heading in ("model", "length", "arm"):
        table.add_column(heading, no_wrap=True, style="bold" if heading == "arm" else "")
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    before = None
    for entry in entries:
        place = (entry["model"], f"{entry['length']:,}")
        if before not in (None, place):
            table.add_section()
        names = (*(place if place != before else ("", "")), entry["arm"])
        table.add_row(*map(Text, names), *(text(entry) for _, text in columns))
        before = place
    return table


def _range(found: dict[str, float], text: Callable[[float], str]) -> str:
    return f"{text(found['p25'])} to {text(found['p75'])}"

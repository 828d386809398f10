"""Tables of the analysis `plan`: the verdict with points without limits, and what each search has tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanlab.report.cells import count, percent, seconds, word
from spanlab.report.tables import MISSING, Cell, Column, Table

Summary = Mapping[str, Any]


def tables_of(summary: Summary, title: str, caveats: Sequence[str]) -> tuple[Table, ...]:
    """The first table, with `caveats` under it, and one per search."""
    return (
        _first(summary, title, caveats),
        *(_search(summary, name) for name, curve in summary["curves"].items() if curve),
    )


def _first(summary: Summary, title: str, caveats: Sequence[str]) -> Table:
    targets = summary["targets"]
    columns = (Column("point", "point", left=True), *_columns(targets))
    rows = [(word(one["says"]), *_cells(one, targets)) for one in summary["references"].values()]
    return Table("plan", f"{title}\n{summary['verdict']}", columns, tuple(rows), tuple(caveats))


def _search(summary: Summary, name: str) -> Table:
    search, targets = summary["searches"][name], summary["targets"]
    key = search["axis"]["key"]
    columns = (Column(key, search["axis"]["label"].replace(" (", "\n(", 1)), *_columns(targets))
    rows = [(Cell(one[key], f"{one[key]:.5g}"), *_cells(one, targets)) for one in summary["curves"][name]]
    marks = tuple(f"{words}: {value:.3g}" for words, value in search["marks"].items())
    return Table(f"plan_{name}", f"{name}\n{search['verdict']}", columns, tuple(rows), marks)


def _columns(targets: Mapping[str, float]) -> tuple[Column, ...]:
    return (
        *(Column(key, f"{key.removesuffix('_s').replace('_', ' ')}\n≤ {limit:g} s") for key, limit in targets.items()),
        Column("meets", "meets"),
        Column("token_hit_rate", "token\nhit rate", 1),
        Column("utilisation", "load ÷\ncapacity", 2),
        Column("preemptions", "preempted\nper run", 3),
    )


def _cells(one: Summary, targets: Mapping[str, float]) -> tuple[Cell, ...]:
    state = "yes" if one["meets"] else "queue grows" if one["queue_grows"] else "no"
    return (
        *(_value(one[key]) for key in targets),
        Cell(one["meets"], state),
        percent(one["token_hit_rate"]),
        MISSING if one["utilisation"] is None else percent(one["utilisation"]),
        count(one["preemptions"]),
    )


def _value(interval: Mapping[str, float | None]) -> Cell:
    mean, low, high = interval["mean"], interval["low"], interval["high"]
    return seconds(mean, None if low is None or high is None else (low, high))

"""Tables of the analysis `plan`: the verdict with the reference points, and the points that each search tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanlab.report.cells import count, percent, seconds, word
from spanlab.report.tables import MISSING, Cell, Column, Table

Summary = Mapping[str, Any]


def tables_of(summary: Summary, title: str, caveats: Sequence[str]) -> tuple[Table, ...]:
    """Return the table of reference points, with `caveats` as notes, and one table per search."""
    return (
        _references_table(summary, title, caveats),
        *(_search_table(summary, name) for name, curve in summary["curves"].items() if curve),
    )


def _references_table(summary: Summary, title: str, caveats: Sequence[str]) -> Table:
    targets = summary["targets"]
    columns = (Column("point", "point", left=True), *_columns(targets))
    rows = [(word(point["says"]), *_cells(point, targets)) for point in summary["references"].values()]
    return Table("plan", f"{title}\n{summary['verdict']}", columns, tuple(rows), tuple(caveats))


def _search_table(summary: Summary, name: str) -> Table:
    search, targets = summary["searches"][name], summary["targets"]
    key = search["axis"]["key"]
    columns = (Column(key, search["axis"]["label"].replace(" (", "\n(", 1)), *_columns(targets))
    rows = [(Cell(point[key], f"{point[key]:.5g}"), *_cells(point, targets)) for point in summary["curves"][name]]
    marks = tuple(f"{label}: {value:.3g}" for label, value in search["marks"].items())
    return Table(f"plan_{name}", f"{name}\n{search['verdict']}", columns, tuple(rows), marks)


def _columns(targets: Mapping[str, float]) -> tuple[Column, ...]:
    return (
        *(Column(key, f"{key.removesuffix('_s').replace('_', ' ')}\n≤ {limit:g} s") for key, limit in targets.items()),
        Column("meets", "meets"),
        Column("token_hit_rate", "token\nhit rate", 1),
        Column("utilisation", "load ÷\ncapacity", 2),
        Column("preemptions", "preempted\nper run", 3),
    )


def _cells(point: Summary, targets: Mapping[str, float]) -> tuple[Cell, ...]:
    state = "yes" if point["meets"] else "queue grows" if point["queue_grows"] else "no"
    return (
        *(_value(point[key]) for key in targets),
        Cell(point["meets"], state),
        percent(point["token_hit_rate"]),
        MISSING if point["utilisation"] is None else percent(point["utilisation"]),
        count(point["preemptions"]),
    )


def _value(interval: Mapping[str, float | None]) -> Cell:
    mean, low, high = interval["mean"], interval["low"], interval["high"]
    return seconds(mean, None if low is None or high is None else (low, high))

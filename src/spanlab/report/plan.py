"""Tables of the analysis `plan`: the verdict with the reference points, and the points that each search tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanlab.report.cells import count, number, percent, seconds_interval, word
from spanlab.report.fields import Field, tabulate, whole
from spanlab.report.tables import Cell, Table

Summary = Mapping[str, Any]


def tables_of(summary: Summary, title: str, caveats: Sequence[str]) -> tuple[Table, ...]:
    """Return the table of reference points, with `caveats` as notes, and one table per search."""
    return (
        _references_table(summary, title, caveats),
        *(_search_table(summary, name) for name, curve in summary["curves"].items() if curve),
    )


def _references_table(summary: Summary, title: str, caveats: Sequence[str]) -> Table:
    fields = (Field("point", "point", word, "says", left=True), *_fields(summary["targets"]))
    rows = summary["references"].values()
    return tabulate("plan", f"{title}\n{summary['verdict']}", fields, rows, caveats)


def _search_table(summary: Summary, name: str) -> Table:
    search = summary["searches"][name]
    axis = search["axis"]
    fields = (
        Field(axis["key"], axis["label"].replace(" (", "\n(", 1), number(".5g"), lambda point: point[axis["key"]]),
        *_fields(summary["targets"]),
    )
    marks = [f"{label}: {value:.3g}" for label, value in search["marks"].items()]
    return tabulate(f"plan_{name}", f"{name}\n{search['verdict']}", fields, summary["curves"][name], marks)


def _fields(targets: Mapping[str, float]) -> tuple[Field, ...]:
    return (
        *(
            Field(key, f"{key.removesuffix('_s').replace('_', ' ')}\n≤ {limit:g} s", seconds_interval)
            for key, limit in targets.items()
        ),
        Field("meets", "meets", _meets, whole),
        Field("token_hit_rate", "token\nhit rate", percent, keep=1),
        Field("utilisation", "load ÷\ncapacity", percent, keep=2),
        Field("preemptions", "preempted\nper run", count, keep=3),
    )


def _meets(point: Summary) -> Cell:
    return Cell(point["meets"], "yes" if point["meets"] else "queue grows" if point["queue_grows"] else "no")
